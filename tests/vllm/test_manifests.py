"""The Kubernetes manifests start vLLM with options that this vLLM has."""

from pathlib import Path

import yaml

_FOLDER = Path(__file__).parents[2] / "examples" / "kubernetes"


def test_vllm_knows_the_options_of_the_manifests() -> None:
    from vllm.engine.arg_utils import AsyncEngineArgs, FlexibleArgumentParser

    for file in ("bucket/vllm.yaml", "volume/vllm.yaml"):
        pod = yaml.safe_load((_FOLDER / file).read_text())["spec"]["template"]["spec"]
        [arguments] = [container["args"] for container in pod["containers"] if container["name"] == "vllm"]
        parser = AsyncEngineArgs.add_cli_args(FlexibleArgumentParser())
        known, unknown = parser.parse_known_args([word for word in arguments if word.startswith("--")])
        assert unknown == ["--port=8000"]  # the server's, not the engine's
        assert known.weight_transfer_config.backend == "delta_snapshot"
        assert (known.served_model_name, known.generation_config, known.max_model_len) == (["policy"], "vllm", 2048)
