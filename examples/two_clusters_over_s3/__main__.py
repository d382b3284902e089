# SPDX-License-Identifier: Apache-2.0
"""Two clusters and a bucket, on one machine: ``python -m examples.two_clusters_over_s3``.

Two network namespaces stand for the clusters. In one of them are a trainer and a real S3 server, in the other an
unmodified vLLM server with `delta-snapshot follow` beside it. A link of 100 Mbit/s joins them, and the S3 server is all
that both use: the trainer connects to no vLLM server, and learns from the bucket which version is served.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path

import torch

from examples.grpo import ExampleError, end_on_sigterm
from examples.grpo.base import checkpoint_base, load_trainer_model, smollm2_base, tiny_base
from examples.two_clusters_over_s3.inference import SAMPLER, inference
from examples.two_clusters_over_s3.permission import WHAT_TO_DO, take_rights
from tools.object_server import ministack
from tools.two_sides import TwoSides, two_sides, why_not
from trainer_hooks import DeltaPublisher
from vllm_delta_snapshot import DeltaSnapshotError
from vllm_delta_snapshot.drive import verify_server

BATCH, WIDTH = 8, 16


@dataclass(frozen=True, slots=True)
class Arrival:
    """How one version came over.

    Attributes:
        version: its number.
        density: changed elements / all elements.
        delta_bytes: bytes of the delta.
        checkpoint_bytes: bytes of the checkpoint.
        published_s: seconds from the step's end until it was in the bucket.
        served_s: seconds from the step's end until the server served it, by the follower's acknowledgement.
        pause_s: seconds for which generation stood still.
    """

    version: int
    density: float
    delta_bytes: int
    checkpoint_bytes: int
    published_s: float
    served_s: float
    pause_s: float


def main(argv: Sequence[str] | None = None) -> int:
    """Run it; return the exit status: 0 if in the end the server's weights are the trainer's."""
    options = make_parser().parse_args(argv)
    take_rights(__package__, list(sys.argv[1:] if argv is None else argv))
    reason = why_not()
    if reason is not None:
        print(f"error: {reason}\n{WHAT_TO_DO}", file=sys.stderr)
        return 1
    end_on_sigterm()
    try:
        arrivals = run(options)
    except (ExampleError, DeltaSnapshotError) as error:
        print(f"error: {error}\nlogs: {options.out}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("interrupted; both clusters are gone", file=sys.stderr)
        return 130
    (options.out / "arrivals.json").write_text(json.dumps([asdict(one) for one in arrivals], indent=1) + "\n")
    return 0


def make_parser() -> argparse.ArgumentParser:
    """Return the parser of the command line."""
    parser = argparse.ArgumentParser(
        prog="python -m examples.two_clusters_over_s3", description="Two clusters, one bucket."
    )
    parser.add_argument("--model", default="smollm2", help="a local bf16 checkpoint, smollm2, or tiny (%(default)s)")
    parser.add_argument("--steps", type=int, default=5, help="optimizer steps; each makes a version (%(default)s)")
    parser.add_argument("--mbit", type=float, default=100.0, help="the link's rate each way, Mbit/s (%(default)g)")
    parser.add_argument("--lr", type=float, default=1e-5, help="AdamW's learning rate (%(default)s)")
    parser.add_argument("--out", type=Path, default=Path("two_clusters_out"), help="for what is written (%(default)s)")
    return parser


def run(options: argparse.Namespace) -> list[Arrival]:
    """Make both clusters, train, and see every version arrive.

    Raises:
        ExampleError: there is no model, or a server did not start.
        DeltaSnapshotError: a version could not be published or did not arrive; or the server's weights are not those
            of the newest version in the end.
    """
    torch.manual_seed(0)
    out = options.out = options.out.resolve()
    out.mkdir(parents=True, exist_ok=True)
    base = _base(options.model, out)
    model = load_trainer_model(base)
    steps = _training(model, options.lr)
    with ExitStack() as ends:
        sides = ends.enter_context(two_sides(mbit=options.mbit))
        with sides.near():
            sync_dir = _bucket(ends, sides, out)
            publisher = ends.enter_context(DeltaPublisher(model, sync_dir=sync_dir, base=base))
        print(f"trainer cluster    {sides.near_address}: trainer and bucket, {sync_dir}", flush=True)
        with sides.far():
            client = ends.enter_context(inference(base, sync_dir, out))
        print(f"inference cluster  {sides.far_address}: vLLM and its follower, which nothing outside can reach")
        print(f"link               {options.mbit:g} Mbit/s each way\n\n{_HEAD}", flush=True)
        arrivals = []
        for _ in range(options.steps):
            next(steps)
            with sides.near():
                arrivals.append(_bring(publisher))
            print(_line(arrivals[-1], options.mbit), flush=True)
        with sides.far():
            verify_server(client, arrivals[-1].version)
    print(f"\nall live weights are those of version {arrivals[-1].version}, bit for bit")
    return arrivals


def _bucket(ends: ExitStack, sides: TwoSides, out: Path) -> str:
    """Start the S3 server, tell this process and its children how to reach it, and return the run's folder there."""
    try:
        store = ends.enter_context(ministack(out / "s3.log", sides.near_address))
    except FileNotFoundError as error:
        raise ExampleError("the S3 server is missing: pip install ministack boto3") from error
    os.environ.update(store.environment)
    return f"s3://{store.make_bucket()}/run"


def _bring(publisher: DeltaPublisher) -> Arrival:
    """Publish, and wait until the bucket says that the version is served. This is all that the trainer does for it."""
    ended = time.time()
    report = publisher.publish().wait()
    published_s = time.time() - ended
    said = publisher.wait_applied([SAMPLER], version=report.version)[SAMPLER]
    return Arrival(
        version=report.version,
        density=report.density,
        delta_bytes=report.payload_bytes,
        checkpoint_bytes=report.checkpoint_bytes,
        published_s=published_s,
        served_s=said.applied_at - ended,  # both clocks are this machine's
        pause_s=said.pause_s,
    )


def _training(model: torch.nn.Module, learning_rate: float) -> Iterator[None]:
    """Take an optimizer step whenever the next item is asked for. Any trainer would do: the tokens are random."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=learning_rate)
    while True:
        batch = torch.randint(0, model.config.vocab_size, (BATCH, WIDTH))
        model(input_ids=batch, labels=batch).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        yield


def _base(model: str, out: Path) -> Path:
    if model == "smollm2":
        return smollm2_base(out)
    return tiny_base(out, seed=0) if model == "tiny" else checkpoint_base(Path(model).resolve(), name=model)


_HEAD = "version  changed      delta (s on the link)   checkpoint (s)    in the bucket   served after     pause"


def _line(one: Arrival, mbit: float) -> str:
    rate = mbit * 1e6 / 8
    delta, whole = (f"{size / 1e6:.1f} MB ({size / rate:.2f})" for size in (one.delta_bytes, one.checkpoint_bytes))
    return (
        f"{one.version:7}  {100 * one.density:5.2f} %  {delta:>23}  {whole:>16}  {one.published_s:13.2f} s"
        f"  {one.served_s:11.2f} s  {1000 * one.pause_s:5.0f} ms"
    )


if __name__ == "__main__":
    sys.exit(main())
