"""Real processes that publish together: ``python -m tests.support.shard_ranks WORK``.

Imports torch once and forks the processes of each case group. Every case leaves a base, a run and, for each version,
what ``full_tensor`` said; what the processes saw is printed as JSON.
"""

from __future__ import annotations

import json
import os
import shutil
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch._dynamo  # FSDP2 imports it at the first use, which costs seconds: once, not in every process
import torch.distributed as dist
import transformers.models.qwen3_moe.modeling_qwen3_moe  # noqa: F401 - the same
from safetensors.torch import save_file
from torch.utils._python_dispatch import TorchDispatchMode

from tests.support.checkpoints import write_checkpoint
from tests.support.shard_behind import ENDS, SCENES, ended, fault_behind
from tests.support.shard_faults import DEATHS, FAULTS, fault, resumed
from tests.support.shard_memory import measured
from tests.support.shard_unsourced import LACKING
from tests.support.shards import CASES, Story, experts, served
from trainer_hooks import ShardedPublisher
from vllm_delta_snapshot.checkpoint import Checkpoint
from vllm_delta_snapshot.errors import DeltaSnapshotError
from vllm_delta_snapshot.runs.run_folder import RunFolder
from vllm_delta_snapshot.store.posix import PosixStore
from vllm_delta_snapshot.upkeep.anchor import write_anchor
from vllm_delta_snapshot.upkeep.retention import RetentionPolicy, plan_pruning, prune

EXPERTS = "experts"
COPIED = "hsdp"
ANCHORED = "an anchor and one delta"
BEHIND = ("fsdp2", "fsdp1", "partials", "hsdp")
"""Cases that are published behind the step. What goes over groups is counted in the thread that steps."""


class Traffic(TorchDispatchMode):
    """Counts what goes over process groups: operations by name, and the bytes of their tensors."""

    def __init__(self) -> None:
        super().__init__()
        self.operations: Counter[str] = Counter()
        self.num_bytes = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if "c10d" in func.namespace:
            self.operations[func._opname] += 1
            tensors = [t for arg in args for t in (arg if isinstance(arg, list | tuple) else [arg])]
            self.num_bytes += sum(t.nbytes for t in tensors if isinstance(t, torch.Tensor))
        return func(*args, **(kwargs or {}))


def ranks(size: int, work: Path, action: Callable[[int], Any]) -> list[Any]:
    """Run `action` in processes of one group; return what each returned, or how it died."""
    children = []
    for rank in range(size):
        child = os.fork()
        if child == 0:
            _child(rank, size, work, action)
        children.append(child)
    deaths = [os.waitpid(child, 0)[1] for child in children]
    results = [work / f"rank-{rank}.json" for rank in range(size)]
    return [
        json.loads(path.read_text()) if death == 0 else {"death": death}
        for path, death in zip(results, deaths, strict=True)
    ]


def _child(rank: int, size: int, work: Path, action: Callable[[int], Any]) -> None:
    code = 1
    try:
        store = dist.FileStore(str(work / "store"), size)
        dist.init_process_group("gloo", store=store, rank=rank, world_size=size)
        (work / f"rank-{rank}.json").write_text(json.dumps(action(rank)))
        code = 0
    except BaseException:  # noqa: BLE001
        import traceback

        traceback.print_exc()
    finally:
        sys.stderr.flush()
        os._exit(code)


def play(name: str, work: Path) -> dict[str, Any]:
    """Play one case on this rank."""
    folder = work / name.replace(" ", "-")
    trained = experts(folder) if name == EXPERTS else CASES[name][1]()
    full = trained.full()
    if dist.get_rank() == 0:
        write_checkpoint(folder / "base", {key: served(key, tensor) for key, tensor in full.items()})
    dist.barrier()
    with Traffic() as opening:
        publisher = ShardedPublisher(
            trained.source,
            sync_dir=str(folder / "run"),
            base=folder / "base",
            asynchronous=name in BEHIND,
            threads=1,
            timeout_s=30,
        )
    publishing = Traffic()
    publications = []
    for number in range(1, Story.STEPS + 1):
        trained.step(number)
        with publishing:
            publications.append(publisher.publish(step=number))
        full = trained.full()
        if dist.get_rank() == 0:
            save_file({key: served(key, t) for key, t in full.items()}, folder / f"expected-{number}.safetensors")
    audits = [audited(publisher)]
    if name == COPIED:
        if dist.get_rank() == 3:  # one copy of two drifts
            with torch.no_grad():
                trained.source.up.weight.to_local().add_(1)
        audits.append(audited(publisher))
    publisher.close()
    reports = [publication.report for publication in publications]
    return {
        "reports": [[report.version, report.changed_elements, report.changed_tensors] for report in reports],
        "operations": dict(opening.operations + publishing.operations),
        "bytes": [opening.num_bytes, publishing.num_bytes],
        "elements": publisher._published.baseline.elements,
        "digest": publisher.state_digest,
        "audits": audits,
    }


def audited(publisher: ShardedPublisher) -> Any:
    """Return what an audit says: version and elements, or the error."""
    try:
        report = publisher.audit()
    except DeltaSnapshotError as error:
        return str(error)
    return [report.version, report.elements, report.state_digest]


def main(work: Path) -> dict[str, Any]:
    torch.set_num_threads(1)
    os.environ["DELTA_SNAPSHOT_KERNEL"] = "0"  # compiled in every process; other tests are about it
    results: dict[str, Any] = {}
    for size in (4, 2):
        names = [name for name, (needed, _) in CASES.items() if needed == size]
        names += [EXPERTS] if size == 2 else []
        of_ranks = ranks(size, _group(work), lambda rank, names=names: {name: play(name, work) for name in names})
        results |= {name: [of_rank.get(name, of_rank) for of_rank in of_ranks] for name in names}
    results["memory"] = ranks(2, _group(work), lambda _: measured(work / "memory"))
    results["faults"] = faults(work)
    return results


def faults(work: Path) -> dict[str, Any]:
    """Play all faults in three processes, at once and behind the step; then continue, in two, what they have left."""
    played: dict[str, Any] = {}
    folders: dict[str, Path] = {}
    for way, play_fault in (("at once", fault), ("behind", fault_behind)):
        into = {name: work / f"{name} {way}".replace(" ", "-") for name in (*FAULTS, *DEATHS)}

        def all_faults(_: int, into: Any = into, play_fault: Any = play_fault) -> dict[str, Any]:
            return {name: play_fault(into[name], *of) for name, of in FAULTS.items()}

        of_ranks = ranks(3, _group(work), all_faults)
        seen = {name: [of_rank.get(name, of_rank) for of_rank in of_ranks] for name in FAULTS}
        for name, (rank, arm) in DEATHS.items():
            seen[name] = ranks(3, _group(work), lambda _, p=play_fault, of=(into[name], rank, arm): p(*of))
        played[way] = seen
        folders |= {f"{name} {way}": folder for name, folder in into.items() if name != "another trainer"}
    folders[ANCHORED] = anchored(folders["an upload that fails behind"], work / ANCHORED.replace(" ", "-"))
    [after, _] = ranks(2, _group(work), lambda _: {name: resumed(folder, 4) for name, folder in folders.items()})
    scenes = {name: work / name.replace(" ", "-") for name in (*SCENES, *LACKING)}
    plays = SCENES | LACKING
    of_ranks = ranks(3, _group(work), lambda _: {name: scene(scenes[name]) for name, scene in plays.items()})
    ends = {how: ranks(2, _group(work), lambda _, how=how: ended(work / f"ended-{how}", how)) for how in ENDS}
    return {"seen": played, "resumed": after, "scenes": of_ranks, "ends": ends}


def anchored(folder: Path, copy: Path) -> Path:
    """Copy a run, and leave only its newest version's delta and an anchor from which it starts."""
    shutil.copytree(folder, copy)
    run = RunFolder(PosixStore(copy / "run"))
    write_anchor(run, Checkpoint(copy / "base"), max(run.versions()) - 1)
    prune(run, plan_pruning(run, RetentionPolicy(keep_versions=1, keep_anchors=1)))
    return copy


def _group(work: Path) -> Path:
    """Return a new folder for what a group of processes writes."""
    folder = work / f"group-{len(list(work.glob('group-*')))}"
    folder.mkdir()
    return folder


if __name__ == "__main__":
    sys.stdout.write("\n" + json.dumps(main(Path(sys.argv[1]))))
