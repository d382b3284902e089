"""Patterns that a user is told to give: few, all that they must match, and nothing else."""

from fnmatch import fnmatchcase

import pytest

from vllm_delta_snapshot.util.patterns import listed, patterns_of

LAYERS = [f"model.layers.{layer}.mlp.weight" for layer in range(12)]
FREQS = [f"model.layers.{layer}.rotary_emb.inv_freq" for layer in range(12)]
EXPERTS = [f"model.layers.12.mlp.experts.{number}.weight" for number in range(200)]


@pytest.mark.parametrize(
    ("names", "others", "patterns"),
    [
        (["lm_head.weight"], LAYERS, ["lm_head.*"]),
        (["mtp.norm.weight", "mtp.fc.weight"], LAYERS, ["mtp.*"]),
        (["model.mtp.fc.weight"], LAYERS, ["model.mtp.*"]),
        (EXPERTS, LAYERS, ["model.layers.12.*"]),
        (FREQS, LAYERS, ["model.layers.*.rotary_emb.*"]),
        ([*EXPERTS, *FREQS, "mtp.x"], LAYERS, ["model.layers.12.*", "model.layers.*.rotary_emb.*", "mtp.*"]),
        (["a.b", "a.bias"], ["a.c"], ["a.b", "a.bias"]),
        (["weight"], ["bias"], ["weight"]),
        (["x.[0]*"], ["x.0y", "x.[0]"], ["x.[[]0][*]"]),
        # the general pattern would match a name that the source has
        (["a.0.b.c", "a.1.b.c"], ["a.x.b.d", "a.0.d", "a.1.d"], ["a.0.b.*", "a.1.b.*"]),
        (LAYERS, [], ["model.*"]),
    ],
)
def test_patterns(names: list[str], others: list[str], patterns: list[str]):
    found = patterns_of(names, others)
    assert found == patterns
    assert all(any(fnmatchcase(name, pattern) for pattern in found) for name in names)
    assert not any(fnmatchcase(other, pattern) for pattern in found for other in others)


def test_long_list_is_cut():
    assert listed(["a", "b"], 2) == "a, b"
    assert listed(["a", "b", "c"], 2) == "a, b and 1 more"
