"""The Triton dialect's other routes: stop, metadata, effective configuration, slots, readiness."""

from __future__ import annotations

from importlib.metadata import version as installed_version
from typing import Any

from mindstream.handlers.base import GetHandler, PostHandler
from mindstream.handlers.error_map import PlainFailure
from mindstream.handlers.state import WIRE_NAME, require_running
from mindstream.handlers.triton_fields import DEFAULTS, ID
from mindstream.plugin.backend import State
from mindstream.plugin.errors import InvalidRequest, NotFound
from mindstream.plugin.service import ModelService

# Of MindIE's number types, the one that /infer takes.
DATATYPE = "UINT32"
_PROTOCOL_DEFAULTS = {
    name: {"value": value, "source": "protocol"} for name, value in DEFAULTS.items()
}


class StopInfer(PostHandler):
    """Ends a running request: its last event has finish_reason stop_sequence."""

    async def answer(self, model: str, version: str | None = None) -> None:
        service = self.state.model(model, version)
        body = await self.json_body()
        require_running(service)
        self.request_id = _stop_id(body)
        if not service.stop_request(self.request_id):
            raise _not_running(service, self.request_id)
        self.write_json(body)


def _stop_id(body: dict[str, Any]) -> str:
    if "id" not in body:
        raise InvalidRequest("Not found id.")
    if body["id"] is None:
        raise InvalidRequest("id must not be null.")
    return str(ID.check(body["id"], "strict"))


def _not_running(service: ModelService, request_id: str) -> NotFound | PlainFailure:
    """The documents promise 404; the real server never gets there and says 500."""
    if service.deployment.serving.validation == "lenient":
        return PlainFailure("Stop request failed, internal failed.")
    return NotFound(f"RequestId is {request_id} not found.")


class ServerMetadata(GetHandler):
    """The server and its limits, those of the first model."""

    async def answer(self) -> None:
        service = next(iter(self.state.services.values()))
        require_running(service)
        serving = service.deployment.serving
        self.write_json(
            {
                "name": WIRE_NAME,
                "version": installed_version("mindstream"),
                "extensions": {
                    "max_iter_times": service.limits.max_iter_times,
                    "prefill_policy_type": 0,  # first come, first served
                    "decode_policy_type": 0,
                    "max_prefill_batch_size": serving.max_batch_size,
                    "max_prefill_tokens": serving.max_batched_tokens,
                },
            }
        )


class ModelMetadata(GetHandler):
    """The tensors of /infer."""

    async def answer(self, model: str, version: str | None = None) -> None:
        self.state.model(model, version)
        tensor = {"shape": [-1], "datatype": DATATYPE}
        self.write_json(
            {
                "name": model,
                "platform": WIRE_NAME,
                "inputs": [{"name": "input0", **tensor}],
                "outputs": [{"name": "output0", **tensor}],
            }
        )


class ModelConfig(GetHandler):
    """MindIE's keys, then what a request gets that leaves a field out."""

    async def answer(self, model: str, version: str | None = None) -> None:
        service = self.state.model(model, version)
        require_running(service)
        deployment, limits = service.deployment, service.limits
        serving, folder = deployment.serving, deployment.model_dir
        self.write_json(
            {
                "model_name": service.name,
                "input_datatype": DATATYPE,
                "output_datatype": DATATYPE,
                "max_seq_len": limits.max_seq_len,
                "npu_mem_size": serving.kv_cache_gib or -1,
                "cpu_mem_size": 0,
                "world_size": 1,
                "model_weight_path": folder.name if folder else "",
                "model_instance_type": "Standard",
                "backend": serving.backend,
                "validation": serving.validation,
                "max_input_token_len": limits.max_input_tokens,
                "max_iter_times": limits.max_iter_times,
                "max_batch_size": serving.max_batch_size,
                "vocab_size": limits.vocab_size,
                "defaults_rule": service.defaults.rule,
                "defaults": {**service.defaults.describe(), **_PROTOCOL_DEFAULTS},
            }
        )


class SlotCount(GetHandler):
    """How many sequences and tokens still fit."""

    async def answer(self, model: str, version: str | None = None) -> None:
        service = self.state.model(model, version)
        require_running(service)
        status = service.status()
        slots = service.deployment.serving.max_batch_size
        up = status.state in (State.READY, State.BUSY)
        self.write_json(
            {
                "total_slots": slots,
                "free_slots": max(0, slots - status.running) if up else 0,
                "available_tokens_length": status.free_blocks * service.backend.limits.block_size,
            }
        )
