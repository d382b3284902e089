"""Agreement of workers, with the gathering of votes replaced: what each of them raises."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from vllm_delta_snapshot.engine import agree as module
from vllm_delta_snapshot.engine.agree import agree
from vllm_delta_snapshot.errors import ApplyError, BaseMismatch, CorruptFile

Errors = list[BaseException | None]


@pytest.fixture
def vote(monkeypatch: pytest.MonkeyPatch) -> Callable[..., list[BaseException | None]]:
    """Return a function that lets every worker vote, and returns what each of them raised."""

    def vote(errors: Errors, states: list[object] | None = None) -> Errors:
        states = states or [None] * len(errors)
        votes: list[object] = []
        monkeypatch.setattr(module, "gather_from_workers", lambda value: votes.append(value) or [value])
        for error, state in zip(errors, states, strict=True):  # the first round only collects the votes
            _raised(error, state)
        monkeypatch.setattr(module, "gather_from_workers", lambda value: votes)
        return [_raised(error, state) for error, state in zip(errors, states, strict=True)]

    return vote


def _raised(error: BaseException | None, state: object) -> BaseException | None:
    try:
        agree(error, state)
    except BaseException as raised:  # noqa: BLE001 - it is what is looked at
        return raised
    return None


def test_workers_without_errors_agree(vote: Callable[..., Errors]) -> None:
    assert vote([None, None, None]) == [None, None, None]


def test_worker_raises_its_own_error_and_the_others_hear_of_it(vote: Callable[..., Errors]) -> None:
    error = BaseMismatch("weights drifted", tensor="w", expected="a", found="b", hint="Restart.")
    first, second, third = vote([None, error, None])
    assert second is error
    for other in (first, third):
        assert isinstance(other, BaseMismatch)
        assert (other.what, other.tensor, other.hint) == ("worker 1: weights drifted", "w", "Restart.")


def test_first_error_is_the_one_that_others_hear_of(vote: Callable[..., Errors]) -> None:
    errors: Errors = [None, CorruptFile("one"), BaseMismatch("other")]
    first, second, third = vote(errors)
    assert isinstance(first, CorruptFile)
    assert (second, third) == (errors[1], errors[2])


@pytest.mark.parametrize("error", [ValueError("no"), KeyboardInterrupt("no")])
def test_any_other_error_reaches_the_others_as_one_of_ours(error: BaseException, vote: Callable[..., Errors]) -> None:
    first, second = vote([None, error])
    assert second is error
    assert isinstance(first, ApplyError)
    assert first.what == f"worker 1: {type(error).__name__}: no"


def test_equal_states_agree(vote: Callable[..., Errors]) -> None:
    assert vote([None, None], [(1, "a"), (1, "a")]) == [None, None]


def test_different_states_are_an_error_on_all_that_names_them(vote: Callable[..., Errors]) -> None:
    for raised in vote([None, None], [("run", 1), ("run", 2)]):
        assert isinstance(raised, ApplyError)
        assert raised.found == "worker 0: ('run', 1); worker 1: ('run', 2)"


def test_an_error_is_told_before_states_are_compared(vote: Callable[..., Errors]) -> None:
    error = CorruptFile("one")
    first, second = vote([error, None], [1, 2])
    assert first is error
    assert isinstance(second, CorruptFile)
