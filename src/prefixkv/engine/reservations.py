"""Prefixes that stay in the cache: found by every later request, evicted by none."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

from prefixkv.cache import CacheManager, Pin, Sequence
from prefixkv.engine.request_state import RequestState
from prefixkv.errors import EngineError, RequestError, brief
from prefixkv.request import RequestOutput, Reservation


class Reservations:
    """The reservations of one engine, by id; the only writer of the cache's pins.

    However many there are, enough blocks are left for the longest request that the engine takes.

    Args:
        prefix_cache: the cache's system.
        most_blocks: how many blocks the longest request needs, of those that may come or are there.
    """

    def __init__(
        self, cache: CacheManager, prefix_cache: str, most_blocks: Callable[[], int]
    ) -> None:
        self._cache = cache
        self._prefix_cache = prefix_cache
        self._most_blocks = most_blocks
        self._pins: dict[str, tuple[Reservation, Pin]] = {}
        self._blocks: Counter[int] = Counter()  # of the pins, and how many of them hold each

    @property
    def num_blocks(self) -> int:
        """Blocks that they hold."""
        return len(self._blocks)

    def listed(self) -> list[Reservation]:
        """All of them, the oldest first."""
        return [reservation for reservation, _ in list(self._pins.values())]

    def check(self, request_id: str, seq: Sequence) -> None:
        """Refuse a reservation that cannot come about, before anything is computed for it.

        Raises:
            RequestError: the cache finds nothing, or no prefix so short; too few blocks would be
                left; or the id is that of another reservation.
        """
        if request_id in self._pins:
            raise RequestError(
                f"reservation id {request_id!r} is in use; release that or choose another",
                param="request_id",
            )
        if self._prefix_cache == "off":
            raise RequestError(
                "the prefix cache is off, so nothing can be reserved; choose another prefix_cache"
            )
        whole, block_size = self._prefix_cache != "paged", self._cache.block_size
        if whole and seq.num_tokens < block_size:
            raise RequestError(
                f"the prompt has {seq.num_tokens} tokens, less than a block of {block_size}, and "
                f"{self._prefix_cache} finds full blocks only; reserve a longer one",
                param="prompt",
            )
        # At least: what is there already is shared, and in radix its last block may be too, though
        # a lookup never covers the last token. `hold` counts what it comes to.
        found = self._cache.lookup(seq).blocks
        more = max((seq.num_tokens - 1) // block_size - len(found), 0)
        self._check_left(more + sum(block not in self._blocks for block in found))

    def hold(self, request: RequestState) -> Reservation:
        """Reserve the prompt of a request that has computed it.

        Raises:
            RequestError: too few blocks would be left.
        """
        (branch,) = request.branches
        assert branch.table is not None  # it has just been computed
        pin = self._cache.reserve(branch.table, request.num_prompt_tokens)
        try:
            self._check_left(sum(block not in self._blocks for block in pin.blocks))
        except RequestError:
            self._cache.release(pin)
            raise
        self._blocks.update(pin.blocks)
        reservation = Reservation(
            request.request_id,
            num_tokens=pin.num_tokens,
            num_prompt_tokens=request.num_prompt_tokens,
            num_computed_tokens=request.num_prompt_tokens - request.num_cached_tokens,
        )
        self._pins[request.request_id] = reservation, pin
        return reservation

    def release(self, reservation_id: str) -> Reservation:
        """End a reservation; in ``hash`` and ``radix`` its prefix stays cached until it is evicted.

        Raises:
            RequestError: there is no such reservation.
        """
        if reservation_id not in self._pins:
            raise RequestError(
                f"there is no reservation {brief(reservation_id)}", code="reservation_not_found"
            )
        reservation, pin = self._pins.pop(reservation_id)
        for block in pin.blocks:
            self._blocks[block] -= 1
            if not self._blocks[block]:
                del self._blocks[block]
        self._cache.release(pin)
        return reservation

    def _check_left(self, more: int) -> None:
        held = len(self._blocks) + more
        left = self._cache.num_blocks - held
        needed = self._most_blocks()
        if left < needed:
            raise RequestError(
                f"{held} blocks would be reserved, which leaves {max(left, 0)} of "
                f"{self._cache.num_blocks}, and the longest request needs {needed}; reserve less, "
                "give the pool more blocks or lower max_model_len",
                code="no_room_for_reservation",
            )


def reservation_of(output: RequestOutput) -> Reservation:
    """What came of a request that was to reserve its prompt.

    Raises:
        RequestError: it was refused, once it was computed.
        EngineError: its computation failed, or was aborted.
    """
    if output.reservation is not None:
        return output.reservation
    if output.finish_reason == "length":
        raise RequestError(output.error or "", code="no_room_for_reservation")
    raise EngineError(output.error or "the reservation was aborted: the engine is stopping")
