# SPDX-License-Identifier: Apache-2.0
"""The verbs of ``delta-snapshot`` and their arguments. What each does lies in a module of its name, imported late."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from vllm_delta_snapshot._version import __version__

__all__ = ["app"]

app = typer.Typer(
    name="delta-snapshot",
    help="Look into runs of weight deltas, verify them, and turn them into checkpoints. "
    "(Weight snapshots; not vLLM's process snapshots.)",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)

AsJson = Annotated[bool, typer.Option("--json", help="Print one JSON object; see docs/cli.md for its fields.")]
Run = Annotated[
    str, typer.Argument(metavar="SYNC_DIR", help="The run's folder: /path, s3://bucket/prefix or gs://bucket/prefix.")
]


class Pause(StrEnum):
    """What a pause does with running requests."""

    KEEP = "keep"
    WAIT = "wait"
    ABORT = "abort"


class Policy(StrEnum):
    """Which versions a follower takes."""

    NEWEST = "newest"
    EVERY = "every"


class ExportFormat(StrEnum):
    """The forms that ``export`` writes."""

    OPENRL_V2 = "openrl-v2"


def _print_version(is_asked: bool) -> None:
    if is_asked:
        typer.echo(__version__)
        raise typer.Exit


@app.callback()
def _root(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    del version


@app.command()
def inspect(
    target: Annotated[
        str,
        typer.Argument(
            metavar="TARGET",
            help="A run or a SkyRL sync_dir (SYNC_DIR), one version (SYNC_DIR@N), or a local delta folder.",
        ),
    ],
    as_json: AsJson = False,
) -> None:
    """Show what a run, a version or a delta folder is. Also reads what OpenRL and SkyRL wrote."""
    from vllm_delta_snapshot.cli import inspect as verb

    verb.run(target, as_json=as_json)


@app.command()
def log(sync_dir: Run, as_json: AsJson = False) -> None:
    """List the versions of a run, newest last: sizes, density, step and recorded metrics.

    What is missing or damaged is listed too; then it exits with 1.
    """
    from vllm_delta_snapshot.cli import log as verb

    verb.run(sync_dir, as_json=as_json)


@app.command()
def plot(
    sync_dir: Run,
    out: Annotated[
        Path | None, typer.Option("--out", "-o", metavar="FOLDER", help="For PNG, SVG and the numbers as CSV.")
    ] = None,
    html: Annotated[
        Path | None, typer.Option(metavar="FILE", help="One HTML page with all pictures and tables, for a browser.")
    ] = None,
    metric: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME", help="Show this recorded metric; may be given several times. Default: the reward."
        ),
    ] = None,
    touched: Annotated[
        bool,
        typer.Option(
            "--touched",
            help="Also count which weights were never changed. Reads every payload; takes a bit of memory a weight.",
        ),
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Draw pictures of a run: density by step and by layer, bytes, and where the time went. Needs matplotlib."""
    from vllm_delta_snapshot.cli import plot as verb

    if out is None and html is None:
        raise typer.BadParameter("say where to: -o FOLDER, --html FILE, or both")
    verb.run(sync_dir, out, html, metric or (), with_touched=touched, as_json=as_json)


@app.command()
def diff(
    a: Annotated[
        str, typer.Argument(metavar="A", help="A version (SYNC_DIR@N; the newest by default) or a checkpoint folder.")
    ],
    b: Annotated[str, typer.Argument(metavar="B", help="Likewise.")],
    base: Annotated[
        Path | None, typer.Option(help="The base checkpoint of the run; by default where the trainer says it was.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Say which tensors differ between two versions or checkpoints: how many elements, and how far.

    Exits with 0 if none does, with 1 if one does, and with 2 or 3 if they cannot be compared. Of two versions of one
    run only what changed between them is read; to compare a version with a checkpoint, it is written out in the temp
    folder.
    """
    from vllm_delta_snapshot.cli import diff as verb

    verb.run(a, b, base, as_json=as_json)


@app.command()
def verify(
    targets: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="SYNC_DIR|FOLDER",
            help="The run's folder: /path or file:///path. Or, with --base, a SkyRL sync_dir, or delta folders of "
            "SkyRL or OpenRL in order.",
        ),
    ] = None,
    base: Annotated[
        Path | None, typer.Option(help="With deltas of SkyRL or OpenRL: the checkpoint that they start from.")
    ] = None,
    server: Annotated[
        str | None, typer.Option(metavar="URL", help="Compare the live weights of this vLLM server instead.")
    ] = None,
    version: Annotated[
        int | None, typer.Option(min=0, help="With --server: the version; by default the one that the server has.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Check every file, checksum and patch of a run, and that its chain holds; or all live weights of a server.

    Exits with 1 if anything is wrong. Deltas of SkyRL and OpenRL are checked against their base checkpoint, as far as
    their form allows, and it is said what was not checked. With --server the engine itself compares, on all its
    workers; generation stands still while it reads its weights once. The API key is taken from VLLM_API_KEY.
    """
    from vllm_delta_snapshot.cli import verify as verb

    if bool(targets) == (server is not None):
        raise typer.BadParameter("give either SYNC_DIR or --server URL")
    if version is not None and server is None:
        raise typer.BadParameter("--version goes with --server; a run is verified as a whole")
    if server is not None and base is not None:
        raise typer.BadParameter("--base goes with deltas of SkyRL or OpenRL; a server is compared with its own run")
    if server is not None:
        verb.run_server(server, version, as_json=as_json)
    elif targets:
        verb.run(targets, base, as_json=as_json)


@app.command()
def sync(
    sync_dir: Run,
    server: Annotated[list[str], typer.Option(metavar="URL", help="A server; may be given several times.")],
    version: Annotated[int | None, typer.Option(min=0, help="The version; by default the newest.")] = None,
    pause_mode: Annotated[Pause, typer.Option(help="What the pause does with running requests.")] = Pause.KEEP,
    timeout: Annotated[float, typer.Option(min=0, metavar="SECONDS", help="How long staging may take.")] = 300.0,
    allow_rollback: Annotated[bool, typer.Option(help="VERSION may be earlier than what a server has.")] = False,
    as_json: AsJson = False,
) -> None:
    """Bring vLLM servers to a version, side by side. Exits with 1 if one of them failed."""
    from vllm_delta_snapshot.cli import sync as verb

    verb.run(
        sync_dir,
        version,
        server,
        pause_mode=pause_mode.value,
        timeout_s=timeout,
        allow_rollback=allow_rollback,
        as_json=as_json,
    )


@app.command()
def follow(
    sync_dir: Annotated[str, typer.Option(metavar="SYNC_DIR", help="The run's folder, as the server reaches it.")],
    server: Annotated[str, typer.Option(metavar="URL", help="The server beside it.")] = "http://127.0.0.1:8000",
    policy: Annotated[Policy, typer.Option(help="Go to the newest version, or take each one.")] = Policy.NEWEST,
    min_interval: Annotated[
        float, typer.Option(min=0, metavar="SECONDS", help="At most one update in this time.")
    ] = 0.0,
    max_lag: Annotated[int, typer.Option(min=0, help="So many versions behind still counts as ready.")] = 1,
    pause_mode: Annotated[Pause, typer.Option(help="What the pause does with running requests.")] = Pause.KEEP,
    listen: Annotated[
        str, typer.Option(metavar="HOST:PORT", help="Where /healthz, /status and /metrics are; '' for nowhere.")
    ] = "127.0.0.1:9470",
    sampler: Annotated[
        str | None, typer.Option(help="Its name in acknowledgements; by default host name and the server's port.")
    ] = None,
    ack: Annotated[bool, typer.Option(help="Write acknowledgements into the store.")] = True,
    timeout: Annotated[float, typer.Option(min=0, metavar="SECONDS", help="How long staging may take.")] = 300.0,
    as_json: AsJson = False,
) -> None:
    """Keep a vLLM server at the versions of a run until SIGTERM. Store and server are all it talks to."""
    from vllm_delta_snapshot.cli import follow as verb
    from vllm_delta_snapshot.drive.follow import FollowConfig

    config = FollowConfig(
        sync_dir=sync_dir,
        policy=policy.value,
        min_interval_s=min_interval,
        max_lag=max_lag,
        pause_mode=pause_mode.value,
        stage_timeout_s=timeout,
    )
    verb.run(config, server, listen=listen or None, sampler=sampler, acknowledges=ack, as_json=as_json)


@app.command()
def repair(
    server: Annotated[str, typer.Option(metavar="URL", help="The server, e.g. http://127.0.0.1:8000.")],
    timeout: Annotated[
        float, typer.Option(min=0, metavar="SECONDS", help="How long making a mirror may take.")
    ] = 600.0,
    as_json: AsJson = False,
) -> None:
    """Write over a server's weights that are not those of its version, because something else changed them."""
    from vllm_delta_snapshot.cli import repair as verb

    verb.run(server, timeout, as_json=as_json)


@app.command()
def doctor(
    sync_dir: Annotated[str | None, typer.Option(metavar="SYNC_DIR", help="Also look at this run's folder.")] = None,
    model: Annotated[
        str | None, typer.Option(help="Also start an engine on this model, and show how each tensor would be served.")
    ] = None,
    dtype: Annotated[str | None, typer.Option(help="With --model: as in `vllm serve`.")] = None,
    quantization: Annotated[str | None, typer.Option(help="With --model: as in `vllm serve`.")] = None,
    gpu_memory_utilization: Annotated[float | None, typer.Option(help="With --model: as in `vllm serve`.")] = None,
    as_json: AsJson = False,
) -> None:
    """Find out whether updates would work here. Exits with 1 if something is in the way."""
    from vllm_delta_snapshot.cli import doctor as verb

    options = {"dtype": dtype, "quantization": quantization, "gpu_memory_utilization": gpu_memory_utilization}
    verb.run(sync_dir, model, options, as_json=as_json)


@app.command()
def materialize(
    targets: Annotated[
        list[str],
        typer.Argument(
            metavar="SYNC_DIR[@N]|FOLDER",
            help="The run and the version; the newest by default. Or, with --base, a SkyRL sync_dir, or delta folders "
            "of SkyRL or OpenRL in order.",
        ),
    ],
    out: Annotated[Path, typer.Argument(metavar="OUT", help="A new folder for the checkpoint.")],
    base: Annotated[
        Path | None, typer.Option(help="The base checkpoint; of a run, by default where the trainer says it was.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Write a version as a plain Hugging Face checkpoint, bit for bit, for transformers and vLLM."""
    from vllm_delta_snapshot.cli import materialize as verb

    verb.run(targets, out, base, as_json=as_json)


@app.command()
def export(
    target: Annotated[
        str,
        typer.Argument(
            metavar="SYNC_DIR[@N]", help="The run, or the SkyRL sync_dir, and the version; the newest by default."
        ),
    ],
    out: Annotated[Path, typer.Argument(metavar="OUT", help="A new folder for the delta.")],
    export_format: Annotated[
        ExportFormat, typer.Option("--format", help="OpenRL's sparse_delta version 2: absolute values, one file.")
    ] = ExportFormat.OPENRL_V2,
    after: Annotated[
        int | None,
        typer.Option("--from", min=0, metavar="M", help="Merge the versions after M; by default only the last one."),
    ] = None,
    base: Annotated[
        Path | None,
        typer.Option(
            help="The base checkpoint, where it is needed: for a SkyRL sync_dir, and for a run that holds differences "
            "(by default where the trainer says it was)."
        ),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Write what a version changes as a delta folder of OpenRL, with absolute values."""
    from vllm_delta_snapshot.cli import export as verb

    verb.run(target, out, export_format.value, after, base, as_json=as_json)


@app.command()
def compact(
    sync_dir: Run,
    start: Annotated[
        int | None, typer.Option("--from", min=0, metavar="M", help="Where to start; by default the newest anchor.")
    ] = None,
    to: Annotated[int | None, typer.Option(min=2, metavar="N", help="Where to end; by default the newest.")] = None,
    as_json: AsJson = False,
) -> None:
    """Merge the deltas between two versions into one, for engines that are far behind. Takes nothing away."""
    from vllm_delta_snapshot.cli import maintain as verb

    verb.run_compact(sync_dir, start, to, as_json=as_json)


@app.command()
def anchor(
    target: Annotated[
        str, typer.Argument(metavar="SYNC_DIR[@N]", help="The run and the version; the newest by default.")
    ],
    base: Annotated[
        Path | None, typer.Option(help="The base checkpoint; by default where the trainer says it was.")
    ] = None,
    scratch: Annotated[
        Path | None, typer.Option(help="A local folder with room for a checkpoint; by default the temp folder.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Publish a version as a whole checkpoint, from which late engines and trainers start."""
    from vllm_delta_snapshot.cli import maintain as verb

    verb.run_anchor(target, base, scratch, as_json=as_json)


@app.command()
def prune(
    sync_dir: Run,
    keep_versions: Annotated[int, typer.Option(min=1, help="Keep the deltas of so many newest versions.")] = 100,
    keep_anchors: Annotated[int, typer.Option(min=1, help="Keep so many newest anchors.")] = 2,
    keep_anchor_every: Annotated[
        int | None, typer.Option(min=1, metavar="K", help="Besides, keep anchors of versions that are multiples of K.")
    ] = None,
    ack_max_age: Annotated[
        float, typer.Option(min=0, metavar="SECONDS", help="An older acknowledgement holds nothing back.")
    ] = 86400.0,
    drop_anchor: Annotated[
        list[int] | None, typer.Option(min=1, metavar="N", help="Also delete this anchor, a damaged one for instance.")
    ] = None,
    yes: Annotated[bool, typer.Option("--yes", help="Do it; without this only what would go is shown.")] = False,
    as_json: AsJson = False,
) -> None:
    """Delete what no anchor, no living sampler and no policy needs. Shows what would go, unless --yes is given."""
    from vllm_delta_snapshot.cli import maintain as verb
    from vllm_delta_snapshot.retention import RetentionPolicy

    policy = RetentionPolicy(keep_versions, keep_anchors, keep_anchor_every, ack_max_age, tuple(drop_anchor or ()))
    verb.run_prune(sync_dir, policy, is_real=yes, as_json=as_json)


@app.command()
def plan(
    params: Annotated[float, typer.Option(min=1, help="Parameters of the model, such as 70e9; in bf16.")],
    gbps: Annotated[
        float, typer.Option(min=1e-6, help="Gbit/s from the trainer to the store, and from the store to each host.")
    ],
    density: Annotated[float, typer.Option(min=1e-9, max=1.0, help="The share that changes per version.")] = 0.01,
    engines: Annotated[int, typer.Option(min=1, help="How many engines, each on a host of its own.")] = 1,
    store_gbps: Annotated[
        float | None, typer.Option(min=1e-6, help="What the store gives to all hosts together; by default no limit.")
    ] = None,
    ranks: Annotated[int, typer.Option(min=1, help="Trainer processes that share the diff.")] = 1,
    workers: Annotated[int, typer.Option(min=1, help="Workers of an engine that share its weights.")] = 1,
    as_json: AsJson = False,
) -> None:
    """Predict how long a version takes from a step to served weights, and say which stage holds it up.

    With coefficients that `make bench-link` measured on a small CPU machine.
    """
    from vllm_delta_snapshot.cli import plan as verb
    from vllm_delta_snapshot.planner import Setup

    verb.run(Setup(params, density, gbps, engines, store_gbps, ranks, workers), as_json=as_json)
