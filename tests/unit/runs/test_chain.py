"""Which deltas lead from one version to another."""

from collections.abc import Callable

import pytest

from tests.support.wire import VERSION
from vllm_delta_snapshot.errors import BaseMismatch, BrokenChain, OutOfOrder
from vllm_delta_snapshot.format.version import VersionRecord
from vllm_delta_snapshot.runs.chain import plan_chain


def digest(version: int) -> str:
    return f"{version + 1000:016x}"


def record(version: int, **changes: object) -> VersionRecord:
    fields = VERSION | {
        "version": version,
        "base_version": version - 1,
        "folder": f"deltas/{version:08d}-01234567",
        "base_state_digest": digest(version - 1),
        "state_digest": digest(version),
    }
    return VersionRecord(**(fields | changes))


def reader(*changed: VersionRecord) -> Callable[[int, int], VersionRecord]:
    table = {item.version: item for item in changed}
    return lambda _, version: table.get(version, record(version))


def test_plan_lists_every_version_between_in_order():
    plan = plan_chain([3, 1, 2, 4], reader(), base_version=1, base_state_digest=digest(1), version=4)
    assert [step.version for step in plan.steps] == [2, 3, 4]
    assert (plan.base_version, plan.version) == (1, 4)
    assert (plan.base_state_digest, plan.state_digest) == (digest(1), digest(4))


def test_plan_to_the_version_at_hand_is_empty():
    plan = plan_chain([1, 2], reader(), base_version=2, base_state_digest=digest(2), version=2)
    assert plan.steps == ()
    assert plan.state_digest == digest(2)


def test_plan_reads_only_the_records_it_needs():
    read: list[int] = []

    def spy(base_version: int, version: int) -> VersionRecord:
        read.append(version)
        return record(version)

    plan_chain(range(1, 100), spy, base_version=40, base_state_digest=digest(40), version=43)
    assert read == [41, 42, 43]


def test_plan_back_to_an_earlier_version_is_out_of_order():
    with pytest.raises(OutOfOrder) as caught:
        plan_chain([1, 2, 3], reader(), base_version=3, base_state_digest=digest(3), version=2)
    assert "version 3" in str(caught.value.expected)


def test_plan_over_a_gap_is_broken_and_names_what_is_missing():
    with pytest.raises(BrokenChain, match="missing: 2, 4"):
        plan_chain([1, 3, 5], reader(), base_version=0, base_state_digest=digest(0), version=5)


def test_plan_to_a_version_not_yet_published_is_broken_and_names_the_newest():
    with pytest.raises(BrokenChain, match="newest is 2, missing: 3"):
        plan_chain([1, 2], reader(), base_version=0, base_state_digest=digest(0), version=3)


def test_plan_in_an_empty_run_is_broken():
    with pytest.raises(BrokenChain, match="newest is 0"):
        plan_chain([], reader(), base_version=0, base_state_digest=digest(0), version=1)


def test_plan_over_a_huge_gap_keeps_its_message_short():
    with pytest.raises(BrokenChain) as caught:
        plan_chain([], reader(), base_version=0, base_state_digest=digest(0), version=100_000)
    assert len(str(caught.value)) < 300


def test_plan_over_a_record_that_starts_elsewhere_is_broken():
    odd = record(3, base_version=1)
    with pytest.raises(BrokenChain, match="version 3 does not continue"):
        plan_chain([1, 2, 3], reader(odd), base_version=0, base_state_digest=digest(0), version=3)


def test_plan_from_other_weights_is_a_base_mismatch():
    with pytest.raises(BaseMismatch, match="version 2 was made against other weights than version 1"):
        plan_chain([1, 2], reader(), base_version=1, base_state_digest=digest(77), version=2)


def test_plan_over_a_record_made_against_other_weights_is_a_base_mismatch():
    odd = record(2, base_state_digest=digest(77))
    with pytest.raises(BaseMismatch) as caught:
        plan_chain([1, 2, 3], reader(odd), base_version=0, base_state_digest=digest(0), version=3)
    assert (caught.value.expected, caught.value.found) == (f"state digest {digest(1)}", f"state digest {digest(77)}")
