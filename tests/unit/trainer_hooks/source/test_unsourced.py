"""Tensors that no source has: kept as the base has them by name, followed where they are tied, refused otherwise."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from tests.support.checkpoints import write_checkpoint
from tests.support.runs import State, assert_same_state, replay
from tests.support.tensors import bits_of
from trainer_hooks import DeltaPublisher, ParameterSource, ShardedPublisher, SourceItem
from trainer_hooks.source.unsourced import check_patterns
from vllm_delta_snapshot.checkpoint import Checkpoint
from vllm_delta_snapshot.errors import SourceError, VerifyError
from vllm_delta_snapshot.runs.materialize import materialize
from vllm_delta_snapshot.runs.run_folder import RunFolder
from vllm_delta_snapshot.store.posix import PosixStore

Weights = dict[str, torch.Tensor]
Publisher = DeltaPublisher | ShardedPublisher

BOTH = pytest.mark.parametrize("make", [DeltaPublisher, ShardedPublisher], ids=["one process", "several"])
EMBED, HEAD = "model.embed_tokens.weight", "lm_head.weight"
NORM, FREQ, MTP = "model.norm.weight", "model.layers.{}.rotary_emb.inv_freq", "mtp.layers.{}.weight"
EXTRA = {FREQ.format(layer): (3,) for layer in range(2)} | {MTP.format(layer): (4, 5) for layer in range(2)}
NAMED = ["mtp.*", "*.inv_freq"]


def weights_of(shapes: dict[str, tuple[int, ...]], seed: int = 0) -> Weights:
    generator = torch.Generator().manual_seed(seed)
    return {name: torch.randn(shape, generator=generator).to(torch.bfloat16) for name, shape in shapes.items()}


def trained() -> Weights:
    return weights_of({EMBED: (6, 4), NORM: (4,), "model.layers.0.weight": (4, 4)})


def write_base(folder: Path, extra: Weights, *, is_tied: bool | None = None) -> Path:
    write_checkpoint(folder / "base", trained() | extra)
    if is_tied is not None:
        config = {"model_type": "tiny", "tie_word_embeddings": is_tied}
        (folder / "base" / "config.json").write_text(json.dumps(config))
    return folder / "base"


def opened(make: type[Publisher], weights: Weights, folder: Path, **options: Any) -> Publisher:
    """Publish what a function yields, one tensor after the other: what every publisher takes."""
    options = {"threads": 1, "asynchronous": False} | options
    return make(lambda: iter(list(weights.items())), sync_dir=str(folder / "run"), base=folder / "base", **options)


def change(weights: Weights, *names: str, by: float = 1.0) -> None:
    for name in names:
        weights[name] = weights[name] + by


def states(folder: Path) -> list[State]:
    return replay(folder / "run", folder / "base", folder)


def state_of(weights: Weights) -> State:
    return {name: bits_of(tensor) for name, tensor in weights.items()}


@BOTH
def test_kept_tensors_are_the_bases_in_every_version(make: type[Publisher], tmp_path: Path):
    extra = weights_of(EXTRA, seed=1)
    base, weights = Checkpoint(write_base(tmp_path, extra)), trained()
    with opened(make, weights, tmp_path, unsourced=NAMED) as publisher:
        expected = [state_of(weights | extra)]
        for _ in range(3):
            change(weights, NORM, EMBED)
            publisher.publish()
            expected.append(state_of(weights | extra))
            report = publisher.audit()
            assert (report.version, report.elements) == (publisher.version, base.total_elements)
    for found, wanted in zip(states(tmp_path), expected, strict=True):
        assert_same_state(found, wanted)
    materialize(RunFolder(PosixStore(tmp_path / "run")), base, 3, tmp_path / "made")
    made = Checkpoint(tmp_path / "made")
    assert_same_state({name: made.bits(name) for name in made.specs}, expected[3])


@BOTH
def test_lack_is_refused_with_every_name_and_the_argument_to_give(make: type[Publisher], tmp_path: Path):
    write_base(tmp_path, weights_of(EXTRA))
    with pytest.raises(SourceError, match="not those of the base checkpoint") as caught:
        opened(make, trained(), tmp_path)
    for name in EXTRA:
        assert f"{name} is missing" in str(caught.value.found)
    assert "have them stay as they are in the base: unsourced=[" in str(caught.value.hint)
    said = str(caught.value.hint).partition("unsourced=")[2].partition("]")[0] + "]"
    assert not (tmp_path / "run" / "run.json").exists()
    with opened(make, trained(), tmp_path, unsourced=json.loads(said)) as publisher:
        publisher.publish()


@BOTH
@pytest.mark.parametrize("patterns", [(), ["*"]])
def test_argument_is_not_offered_where_names_do_not_fit_at_all(
    make: type[Publisher], patterns: list[str], tmp_path: Path
):
    write_base(tmp_path, {})
    with pytest.raises(SourceError, match=r"is not in the base checkpoint") as caught:
        opened(make, {f"module.{name}": tensor for name, tensor in trained().items()}, tmp_path, unsourced=patterns)
    assert "unsourced" not in str(caught.value)


@BOTH
def test_what_the_source_has_is_published_whatever_was_named(
    make: type[Publisher], tmp_path: Path, caplog: pytest.LogCaptureFixture
):
    extra = weights_of(EXTRA, seed=1)
    write_base(tmp_path, extra)
    weights = trained()
    with opened(make, weights, tmp_path, unsourced=["*", "mpt.*"]) as publisher:
        change(weights, *weights)
        publisher.publish()
    assert_same_state(states(tmp_path)[1], state_of(weights | extra))
    said = [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]
    assert sum("4 tensors (46 elements); they stay as in the base" in line for line in said) == 1
    assert "unsourced: 'mpt.*' matches no tensor of the base checkpoint" in said
    assert any("unsourced: '*' also matches what is published nevertheless: " in line for line in said)


@BOTH
def test_kept_tensor_that_the_source_comes_to_have_is_never_left_out(make: type[Publisher], tmp_path: Path):
    extra = weights_of(EXTRA, seed=1)
    write_base(tmp_path, extra)
    weights = trained()
    publisher = opened(make, weights, tmp_path, unsourced=NAMED)
    weights[MTP.format(0)] = extra[MTP.format(0)] + 1
    with pytest.raises(SourceError, match=r"had not when|other boxes than when") as caught:
        publisher.publish()
    assert caught.value.tensor == MTP.format(0)
    publisher.close()
    with opened(make, weights, tmp_path, unsourced=NAMED) as publisher:
        publisher.publish()
    assert_same_state(states(tmp_path)[1], state_of(extra | weights))


@BOTH
def test_run_goes_on_with_other_tensors_kept_unless_they_were_trained(make: type[Publisher], tmp_path: Path):
    extra = weights_of(EXTRA, seed=1)
    write_base(tmp_path, extra)
    weights = trained()
    with opened(make, weights, tmp_path, unsourced=NAMED) as publisher:
        change(weights, NORM)
        publisher.publish()
    more = weights | {name: extra[name] for name in extra if "mtp" in name}
    with opened(make, more, tmp_path, unsourced=["*.inv_freq"]) as publisher:
        change(more, MTP.format(1))
        publisher.publish()
    assert_same_state(states(tmp_path)[2], state_of(extra | more))
    for patterns in (NAMED, ["*"]):
        with pytest.raises(SourceError, match="at version 2 not as they are in the base checkpoint") as caught:
            opened(make, weights, tmp_path, unsourced=patterns)
        assert caught.value.tensor == MTP.format(1)


@BOTH
def test_bare_string_is_no_list_of_patterns(make: type[Publisher], tmp_path: Path):
    write_base(tmp_path, {})
    for given in ("mtp.*", [1]):
        with pytest.raises(ValueError, match="must be a list of patterns"):
            opened(make, trained(), tmp_path, unsourced=given)
    assert check_patterns(["a", "b"]) == ("a", "b")


# Tied weights


@BOTH
@pytest.mark.parametrize(("has", "lacks"), [(EMBED, HEAD), (HEAD, EMBED)])
def test_stored_copy_of_a_tied_weight_follows_it(
    make: type[Publisher], has: str, lacks: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
):
    write_base(tmp_path, {HEAD: trained()[EMBED]}, is_tied=True)
    weights = {has if name == EMBED else name: tensor for name, tensor in trained().items()}
    with opened(make, weights, tmp_path) as publisher:
        for number in range(2):
            change(weights, has, NORM)
            publisher.publish()
            assert publisher.audit().version == number + 1
            assert_same_state(states(tmp_path)[number + 1], state_of(weights | {lacks: weights[has]}))
    said = [r.getMessage() for r in caplog.records if r.name == "trainer_hooks.source.unsourced"]
    assert said == [f"{lacks} is stored as a copy of {has}, to which it is tied, and follows it"]


@BOTH
def test_copy_that_was_kept_once_follows_from_the_next_version_on(make: type[Publisher], tmp_path: Path):
    """A run that was begun when its base said nothing of ties."""
    write_base(tmp_path, {HEAD: trained()[EMBED]})
    weights = trained()
    with opened(make, weights, tmp_path, unsourced=[HEAD]) as publisher:
        change(weights, EMBED)
        publisher.publish()
    assert_same_state(states(tmp_path)[1], state_of(weights | {HEAD: trained()[EMBED]}))
    write_base(tmp_path, {HEAD: trained()[EMBED]}, is_tied=True)
    with opened(make, weights, tmp_path) as publisher:
        publisher.publish()
    assert_same_state(states(tmp_path)[2], state_of(weights | {HEAD: weights[EMBED]}))


@BOTH
@pytest.mark.parametrize("is_tied", [False, None])
def test_copy_of_weights_that_nothing_says_to_be_tied_is_refused_as_what_it_is(
    make: type[Publisher], is_tied: bool | None, tmp_path: Path
):
    write_base(tmp_path, {HEAD: trained()[EMBED]}, is_tied=is_tied)
    with pytest.raises(SourceError) as caught:
        opened(make, trained(), tmp_path)
    assert caught.value.found == f"{HEAD} is missing (in the base a copy of {EMBED})"
    assert f"have the source yield the tensor of {EMBED} as {HEAD} too" in str(caught.value.hint)
    weights = trained()
    weights[HEAD] = weights[EMBED]  # that way out
    with opened(make, weights, tmp_path) as publisher:
        publisher.publish()


@BOTH
@pytest.mark.parametrize("has", [(EMBED,), (HEAD,)])
def test_one_of_weights_that_the_base_says_to_be_tied_but_stores_unequal_is_refused(
    make: type[Publisher], has: tuple[str, ...], tmp_path: Path
):
    write_base(tmp_path, {HEAD: trained()[EMBED] + 1}, is_tied=True)
    weights = trained() | {HEAD: trained()[EMBED] + 1}
    for name in {EMBED, HEAD}.difference(has):
        del weights[name]
    with pytest.raises(SourceError, match="says that its embeddings are tied, but stores two that differ") as caught:
        opened(make, weights, tmp_path, unsourced=["*"])
    assert caught.value.tensor == f"{EMBED} and {HEAD}"


@BOTH
def test_tied_weights_that_a_trainer_has_twice_must_stay_equal(make: type[Publisher], tmp_path: Path):
    write_base(tmp_path, {HEAD: trained()[EMBED]}, is_tied=True)
    weights = trained() | {HEAD: trained()[EMBED]}
    publisher = opened(make, weights, tmp_path)
    change(weights, EMBED, HEAD)
    publisher.publish()
    change(weights, EMBED)
    with pytest.raises(SourceError, match="tied weights have become different"):
        publisher.publish()
    assert publisher.version == 1
    change(weights, HEAD)
    publisher.publish()
    publisher.close()
    assert_same_state(states(tmp_path)[2], state_of(weights))


@BOTH
@pytest.mark.parametrize(("is_tied", "head"), [(False, 0), (None, 0), (True, 1)])
def test_weights_that_are_two_may_differ(make: type[Publisher], is_tied: bool | None, head: int, tmp_path: Path):
    """Also where the configuration is wrong: loaders look at the two then, and take both."""
    write_base(tmp_path, {HEAD: trained()[EMBED] + head}, is_tied=is_tied)
    weights = trained() | {HEAD: trained()[EMBED] + head}
    with opened(make, weights, tmp_path) as publisher:
        change(weights, HEAD)
        publisher.publish()
    assert_same_state(states(tmp_path)[1], state_of(weights))


class TiedModel(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.model = nn.Module()
        self.model.embed_tokens = nn.Embedding(6, 4)
        self.lm_head = nn.Linear(4, 6, bias=False)
        self.lm_head.weight = self.model.embed_tokens.weight


@pytest.mark.parametrize(
    "give",
    [lambda model: model, lambda model: model.state_dict(), lambda model: list(model.state_dict().items())],
    ids=["a module", "its state dict", "a list of that"],
)
@pytest.mark.parametrize("stored", [(EMBED,), (HEAD,), (EMBED, HEAD)])
def test_tied_model_is_published_under_the_names_that_the_base_has(
    give: Callable[[TiedModel], Any], stored: tuple[str, ...], tmp_path: Path
):
    model = TiedModel()
    weight = model.lm_head.weight.detach()
    write_checkpoint(tmp_path / "base", {name: weight.clone() for name in stored})
    (tmp_path / "base" / "config.json").write_text('{"tie_word_embeddings": true}')
    with DeltaPublisher(give(model), sync_dir=str(tmp_path / "run"), base=tmp_path / "base") as publisher:
        with torch.no_grad():
            weight.add_(1)
        publisher.publish().wait()
    assert_same_state(states(tmp_path)[1], state_of(dict.fromkeys(stored, weight)))


def test_second_name_that_a_stream_yields_is_said_to_be_tied(tmp_path: Path):
    write_base(tmp_path, {}, is_tied=True)
    weights = trained() | {HEAD: trained()[EMBED]}
    with pytest.raises(SourceError, match=f"stores tied weights once, as {EMBED}: leave it out"):
        opened(DeltaPublisher, weights, tmp_path)


class Fingerprinted(ParameterSource):
    """Promises that what was not replaced is unchanged."""

    def __init__(self, weights: Weights) -> None:
        self.weights = weights
        self.read: list[str] = []

    def items(self, specs: object) -> Iterator[SourceItem]:
        for name, tensor in list(self.weights.items()):

            def load(name: str = name, tensor: torch.Tensor = tensor) -> tuple[tuple[str, torch.Tensor], ...]:
                self.read.append(name)
                return ((name, tensor),)

            yield SourceItem((name,), load, fingerprint=id(tensor))


def test_copy_is_skipped_with_what_it_copies_and_audited_nevertheless(tmp_path: Path):
    write_base(tmp_path, {HEAD: trained()[EMBED]}, is_tied=True)
    source = Fingerprinted(trained())
    where = {"sync_dir": str(tmp_path / "run"), "base": tmp_path / "base", "asynchronous": False}
    with DeltaPublisher(source, **where) as publisher:
        publisher.publish()
        source.read.clear()
        publisher.publish()
        assert source.read == []
        change(source.weights, EMBED)
        publisher.publish()
        assert source.read == [EMBED]
        with torch.no_grad():
            source.weights[EMBED].add_(1)  # which the fingerprint does not tell
        with pytest.raises(VerifyError, match="the weights are not version 3") as caught:
            publisher.audit()
        assert set(str(caught.value.tensor).split(", ")) == {EMBED, HEAD}
        publisher.publish()
    assert_same_state(states(tmp_path)[4], state_of(source.weights | {HEAD: source.weights[EMBED]}))
