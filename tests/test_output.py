"""Text of a stream of tokens: nothing is shown that a stop string would take back."""

from __future__ import annotations

import random

import pytest

from prefixkv.engine.output import TextStream


class Letters:
    """A detokenizer whose tokens are characters; it may keep some until the end."""

    def __init__(self, keep: str = "") -> None:
        self._keep = keep

    def push(self, token_id: int) -> str:
        return chr(token_id)

    def flush(self) -> str:
        return self._keep


def read(text: str, *stop: str, keep: str = "") -> tuple[list[str], str | None]:
    """Pieces as they come out, the flushed one last, and the stop string that was met."""
    stream = TextStream(Letters(keep), stop)
    pieces = []
    for letter in text:
        piece, met = stream.push(ord(letter))
        pieces.append(piece)
        if met is not None:
            return pieces, met
    piece, met = stream.flush()
    return [*pieces, piece], met


def test_text_without_stop_strings_comes_at_once() -> None:
    assert read("abc") == (["a", "b", "c", ""], None)


def test_text_ends_before_the_stop_string() -> None:
    pieces, met = read("one END two", "END")
    assert ("".join(pieces), met) == ("one ", "END")


def test_the_start_of_a_stop_string_is_held_back_until_it_is_none() -> None:
    assert read("xENy", "END") == (["x", "", "", "ENy", ""], None)


def test_a_held_piece_comes_out_at_the_end() -> None:
    assert read("xEN", "END") == (["x", "", "", "EN"], None)


def test_the_first_of_several_stop_strings_counts() -> None:
    pieces, met = read("a b c", "c", "b")
    assert ("".join(pieces), met) == ("a ", "b")


def test_a_stop_string_can_end_in_what_the_detokenizer_kept() -> None:
    pieces, met = read("abcE", "END", keep="ND!")
    assert ("".join(pieces), met) == ("abc", "END")


def test_stop_strings_do_not_count_before_they_may() -> None:
    stream = TextStream(Letters(), ["a"])
    assert stream.push(ord("a"), may_stop=False) == ("a", None)
    assert stream.push(ord("a")) == ("", "a")


@pytest.mark.parametrize("seed", range(200))
def test_any_cut_of_the_text_gives_what_cutting_the_whole_gives(seed: int) -> None:
    rng = random.Random(seed)
    text = "".join(rng.choice("ab") for _ in range(rng.randrange(40)))
    stop = ["".join(rng.choice("ab") for _ in range(rng.randrange(3, 7))) for _ in range(2)]
    pieces, met = read(text, *stop)
    ends = [(text.find(each) + len(each), each) for each in stop if each in text]
    if not ends:
        assert ("".join(pieces), met) == (text, None)
        return
    # The stream stops at the first token that completes a stop string.
    end = min(ends)[0]
    completed = {each for at, each in ends if at == end}
    assert met in completed
    assert "".join(pieces) == text[: min(text[:end].find(each) for each in completed)]
