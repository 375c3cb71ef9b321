// Arrays of one step, for a forward pass with paged attention.
#include <nanobind/stl/tuple.h>

#include "bind_types.h"
#include "errors.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace prefixkv {
namespace {

using StepArrays = nb::typed<nb::tuple, Array<int64_t>, Array<int64_t>, Array<int32_t>, Array<int32_t>,
                             Array<int32_t>, Array<int32_t>>;

template <typename T>
using Iterable = nb::typed<nb::iterable, T>;

// What a forward pass with paged attention needs, from the sequences and tables of one step.
StepArrays step_arrays(const Iterable<PySequence>& seq_items, const Iterable<PyTable>& table_items,
                       const Iterable<int64_t>& start_items, const Iterable<int64_t>& stop_items) {
  const Items<PySequence> held_seqs(seq_items);
  const Items<PyTable> held_tables(table_items);
  const std::vector<int64_t> starts = read_numbers(start_items, "starts");
  const std::vector<int64_t> stops = read_numbers(stop_items, "stops");
  const std::vector<PySequence*>& seqs = *held_seqs;
  const std::vector<PyTable*>& tables = *held_tables;
  const size_t count = tables.size();
  if (seqs.size() != count || starts.size() != count || stops.size() != count) {
    throw CacheError("step_arrays needs as many sequences, starts and stops as tables");
  }
  std::vector<int32_t> query_start(count + 1), num_computed(count), table_start(count + 1), blocks;
  std::vector<int64_t> token_ids, positions;
  for (size_t i = 0; i < count; ++i) {
    const BlockTable& table = *tables[i]->table;
    const Sequence& seq = *seqs[i]->seq;
    if (starts[i] < 0 || stops[i] <= starts[i] || stops[i] > table.num_tokens ||
        stops[i] > seq.num_tokens()) {
      throw CacheError("a step computes tokens " + std::to_string(starts[i]) + " to " +
                       std::to_string(stops[i]) + " of a sequence of " +
                       std::to_string(seq.num_tokens()) + " in a table with room for " +
                       std::to_string(table.num_tokens));
    }
    const int64_t block_size = tables[i]->manager->hasher()->block_size();
    const int64_t needed = (stops[i] + block_size - 1) / block_size;
    query_start[i + 1] = query_start[i] + static_cast<int32_t>(stops[i] - starts[i]);
    num_computed[i] = static_cast<int32_t>(starts[i]);
    blocks.insert(blocks.end(), table.blocks.begin(), table.blocks.begin() + needed);
    table_start[i + 1] = static_cast<int32_t>(blocks.size());
    token_ids.insert(token_ids.end(), seq.tokens() + starts[i], seq.tokens() + stops[i]);
    for (int64_t position = starts[i]; position < stops[i]; ++position) positions.push_back(position);
  }
  return StepArrays(nb::make_tuple(to_array(std::move(token_ids)), to_array(std::move(positions)),
                                   to_array(std::move(query_start)), to_array(std::move(num_computed)),
                                   to_array(std::move(table_start)), to_array(std::move(blocks))));
}

}  // namespace

void bind_step(nb::module_& m) {
  m.def("step_arrays", &step_arrays, "seqs"_a, "tables"_a, "starts"_a, "stops"_a,
        "Arrays of one step that computes tokens [start, stop) of each of S sequences, T in all: "
        "token_ids [T] and positions [T] (int64); query_start [S+1], num_computed [S], "
        "table_start [S+1] and block_ids (int32).");
}

}  // namespace prefixkv
