"""The real SGLang in one process of several: loads a model and keeps digests of all its tensors."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import torch

from tests.sglang.sweep.checkpoints import arguments as arguments_of
from tests.sweep.engine import Loaded, digest, is_untouched, tensors_of


class Engine:
    """The engine's groups in this process; one model after the other."""

    def __init__(self, rank: int, world_size: int, port: int) -> None:
        self.rank, self.world_size, self._port = rank, world_size, port
        self._report = Path(os.environ["FASTLOAD_REPORT"])
        self._arranged = False
        import fastload_sglang

        fastload_sglang.register()
        # What no loader fills is then the same in every load, and can be told from the rest.
        torch.use_deterministic_algorithms(True, warn_only=True)

    def load(self, command: dict[str, Any], load_format: str) -> Loaded:
        """Load the model of a directory, as the engine's scheduler does."""
        from sglang.srt.configs.device_config import DeviceConfig
        from sglang.srt.model_loader import get_model_loader
        from sglang.srt.model_loader.loader import DefaultModelLoader

        model_config, load_config = self._configure(command, load_format)
        loaded = Loaded()
        original = DefaultModelLoader.postprocess_weights
        # Some models put another function here, for good.
        prepare = DefaultModelLoader._prepare_weights

        def watched(model: Any, target_device: Any) -> None:
            for name, tensor in tensors_of(model):
                loaded.raw[name] = digest(tensor)
                if isinstance(tensor, torch.nn.Parameter):
                    loaded.own_bytes += tensor.nbytes
                if is_untouched(tensor):
                    loaded.untouched.append(name)
            try:
                original(model, target_device)
            except Exception as error:
                loaded.refused = f"{type(error).__name__}: {str(error).strip()[:200]}"

        self._report.unlink(missing_ok=True)
        torch.manual_seed(0)
        DefaultModelLoader.postprocess_weights = staticmethod(watched)
        try:
            model = get_model_loader(load_config, model_config).load_model(
                model_config=model_config, device_config=DeviceConfig("cpu")
            )
        finally:
            DefaultModelLoader.postprocess_weights = staticmethod(original)
            DefaultModelLoader._prepare_weights = prepare
        if loaded.refused is None:
            loaded.final = {name: digest(tensor) for name, tensor in tensors_of(model)}
        if load_format == "fastload":
            [line] = self._report.read_text().splitlines()
            loaded.report = json.loads(line)
        return loaded

    def _configure(self, command: dict[str, Any], load_format: str) -> tuple[Any, Any]:
        from sglang.srt.configs.load_config import LoadConfig
        from sglang.srt.configs.model_config import ModelConfig
        from sglang.srt.distributed import bootstrap
        from sglang.srt.runtime_context import SpawnRanks, publish
        from sglang.srt.server_args import ServerArgs

        arguments = {
            "model_path": command["directory"],
            "load_format": load_format,
            "device": "cpu",
            "tp_size": self.world_size,
            "attention_backend": "torch_native",
            "sampling_backend": "pytorch",
            "disable_cuda_graph": True,
            "disable_radix_cache": True,
            "skip_tokenizer_init": True,
            "max_total_tokens": 64,
            **arguments_of(command["architecture"]),
        }
        server_args = ServerArgs(**arguments)
        publish(
            server_args,
            role="scheduler",
            ranks=SpawnRanks(world_rank=self.rank, dp_rank=None, gpu_id=self.rank),
        )
        if not self._arranged:
            bootstrap.init_parallel_runtime(
                server_args=server_args, device="cpu", dist_port=self._port
            )
            self._arranged = True
        model_config = ModelConfig.from_server_args(
            server_args, is_draft_model=" draft" in command["architecture"]
        )
        bootstrap.init_layer_runtime(model_config=model_config)
        return model_config, LoadConfig(load_format=load_format, tp_rank=self.rank)
