"""Adapters that requests name: read when one is first asked for, and kept."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass, replace
from pathlib import Path
from reprlib import repr as short
from threading import Lock
from typing import Any

from infinilm.adapters import Adapter
from infinilm.checkpoint import CheckpointError
from infinilm.config import EngineConfig
from infinilm.engine.prefixes import digest_of
from infinilm.engine.request import RequestError
from infinilm.models.llama import LlamaForCausalLM
from infinilm.models.lora import read_adapter


@dataclass(frozen=True)
class LoRARequest:
    """An adapter that a request is answered with: a folder that PEFT has saved, under a name.

    It is read once. Who has trained it further in the same folder gives it another number, as with vLLM.
    """

    lora_name: str
    lora_int_id: int
    lora_path: str | Path

    def __post_init__(self) -> None:
        if not isinstance(self.lora_name, str) or not self.lora_name:
            raise ValueError(f"lora_name must be a name, but is {short(self.lora_name)}")
        if type(self.lora_int_id) is not int or self.lora_int_id < 1:
            raise ValueError(f"lora_int_id must be a whole number from 1, but is {short(self.lora_int_id)}")
        if not isinstance(self.lora_path, str | Path) or not str(self.lora_path):
            raise ValueError(f"lora_path must be the path of a folder, but is {short(self.lora_path)}")


class Adapters:
    """The adapters of one model. Any thread may ask; beyond max_loras the one longest not asked for goes."""

    def __init__(self, model: LlamaForCausalLM, config: EngineConfig) -> None:
        self._model, self._config = model, config
        self._kept: OrderedDict[tuple[str, int], Adapter] = OrderedDict()
        self._lock = Lock()

    def of(self, request: Any) -> Adapter | None:
        """The adapter that a request names; RequestError if it cannot be had"""
        if request is None:
            return None
        if not isinstance(request, LoRARequest):
            raise RequestError(f"lora_request must be a LoRARequest, but is {short(request)}")
        if not self._config.enable_lora:
            raise RequestError("lora_request: enable_lora is False, so that no adapter is loaded")
        with self._lock:
            return self._found(request)

    def _found(self, request: LoRARequest) -> Adapter:
        key = str(request.lora_path), request.lora_int_id
        if key not in self._kept:
            self._kept[key] = self._read(key[0])
        self._kept.move_to_end(key)
        while len(self._kept) > self._config.max_loras:
            self._kept.popitem(last=False)
        return self._kept[key]

    def _read(self, path: str) -> Adapter:
        try:
            adapter = read_adapter(path, self._model, self._config.max_lora_rank)
        except CheckpointError as error:
            raise RequestError(f"lora_request: {error}") from error
        tensors = [
            (f"{name}.{side}", tensor)
            for name, pair in sorted(adapter.weights.items())
            for side, tensor in zip("ab", pair, strict=True)
        ]
        return replace(adapter, digest=digest_of(tensors))
