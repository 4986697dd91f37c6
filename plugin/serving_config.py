"""The `serving:` block of a deployment yaml: what MindFormers has no field for.

Bounds and descriptions live in the annotations: `model_config` checks by them, and
`python -m mindstream.plugin.config_docs` prints the table of model_configs/README.md from them.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated, Any, Literal

from msgspec import Meta


def _doc(text: str, **bounds: Any) -> Meta:
    return Meta(description=text, **bounds)


@dataclass(frozen=True, slots=True)
class CompatConfig:
    """`serving.compat`: faults of the server this one replaces, for clients that rely on them."""

    raw_error_text: Annotated[
        bool, _doc("After the stream opened, send an error as MindIE's bare text, not as an event.")
    ] = False


@dataclass(frozen=True, slots=True)
class CpuConfig:
    """`serving.cpu`: how the `mindspore` backend computes on CPU. Ignored on Ascend."""

    kernels: Annotated[
        Literal["auto", "fused", "attention", "stock"],
        _doc(
            "`fused`: one operator for the whole model; `attention`: stock operators and a C++ "
            "attention; `stock`: MindSpore's own operators alone; `auto`: the fastest that the "
            "compiled library and the model's shapes allow, and where that is not `fused` one "
            "line of the log says which and why."
        ),
    ] = "auto"
    weights: Annotated[
        Literal["bf16", "int8", "f32"],
        _doc(
            "Weights of the fused kernels; the others run float32. Against float32 the demo "
            "model's perplexity on a fixed English text changes by less than 0.1 % with bf16 "
            "weights and KV cache, and by 0.7 % with int8 weights."
        ),
    ] = "bf16"
    kv_cache: Annotated[
        Literal["auto", "f32", "bf16"],
        _doc(
            "Element type of the KV cache. `auto`: `bf16` where the fused kernels hold bf16 or "
            "int8 weights, else `f32`, which is all the other kernels have."
        ),
    ] = "auto"
    threads: Annotated[int, _doc("Threads of the kernels; 0: one a core.", ge=0, le=1024)] = 0


@dataclass(frozen=True, slots=True)
class MediaConfig:
    """`serving.media`: where a multimodal request may take media from."""

    local_dir: Annotated[str, _doc("The one folder below which media files are read.")] = (
        "/data/multimodal_inputs/"
    )
    connect_timeout: Annotated[float, _doc("Seconds to connect to a media host.", gt=0)] = 5.0
    read_timeout: Annotated[float, _doc("Seconds without a byte from it.", gt=0)] = 30.0


@dataclass(frozen=True, slots=True)
class WatermarkConfig:
    """`serving.watermark`: the green-list watermark of requests with `watermark: true`."""

    key_file: Annotated[
        str, _doc("File with the secret key; empty: a public key that anyone can detect and forge.")
    ] = ""
    gamma: Annotated[float, _doc("Share of the vocabulary that is green.", gt=0, lt=1)] = 0.25
    delta: Annotated[float, _doc("What is added to a green token's logit.", gt=0, le=20)] = 4.0


@dataclass(frozen=True, slots=True)
class EchoConfig:
    """`serving.echo`: the demonstration backend."""

    delay_ms: Annotated[float, _doc("Milliseconds a step takes.", ge=0, le=60_000)] = 0.0
    num_blocks: Annotated[int, _doc("KV-cache blocks it pretends to have.", ge=1)] = 4096
    block_size: Annotated[int, _doc("Tokens a block holds.", ge=1, le=1024)] = 16


@dataclass(frozen=True, slots=True)
class ServingConfig:
    """The `serving:` block. Names follow MindIE's config.json."""

    name: Annotated[
        str,
        _doc("The model name in URLs. Default: the file's name.", pattern=r"^$|^[\w\-.]{1,256}$"),
    ] = ""
    backend: Annotated[str, _doc("Entry point of the group `mindstream.backends`.")] = "mindspore"
    model_weight_path: Annotated[
        str, _doc("Weight directory; default: the yaml's `pretrained_model_dir`, else its folder.")
    ] = ""
    pull: Annotated[
        str, _doc("Demo model that `mindstream pull` fetches into the weight directory.")
    ] = ""
    tokenizer: Annotated[
        Literal["auto", "bytes"],
        _doc("`auto`: tokenizer.json of the weight directory; `bytes`: one token a UTF-8 byte."),
    ] = "auto"
    defaults_rule: Annotated[
        Literal["auto", "ms", "atb"],
        _doc(
            "Where an absent top_k comes from. `ms`: the yaml, else 0; `atb`: "
            "generation_config.json over config.json, else 1000; `auto`: what the backend "
            "declares, else `ms`."
        ),
    ] = "auto"
    validation: Annotated[
        Literal["strict", "lenient"],
        _doc("`strict`: the documented ranges; `lenient`: their union with the real server's."),
    ] = "strict"
    full_text_enabled: Annotated[
        bool, _doc("Every event carries the whole text so far (MindIE's fullTextEnabled).")
    ] = False
    measured_costs: Annotated[
        bool,
        _doc("Fill details.first_token_cost and details.decode_cost, which MindIE leaves null."),
    ] = False
    max_seq_len: Annotated[
        int, _doc("Prompt and output tokens together; 0: what the model allows.", ge=0)
    ] = 0
    max_input_token_len: Annotated[
        int, _doc("Prompt tokens; 0: max_seq_len - 1.", ge=0, le=4_194_304)
    ] = 0
    max_iter_times: Annotated[
        int, _doc("Cap on the output tokens of one request; 0: max_seq_len.", ge=0)
    ] = 512
    max_batch_size: Annotated[int, _doc("Sequences that run at once.", ge=1, le=4096)] = 64
    max_waiting: Annotated[
        int, _doc("Requests that may wait; one more is refused with 503.", ge=0, le=1_000_000)
    ] = 1000
    max_batched_tokens: Annotated[
        int, _doc("Token budget of one step; long prompts are cut to it.", ge=1, le=1_048_576)
    ] = 512
    kv_cache_gib: Annotated[
        float,
        _doc(
            "Memory of the KV cache in GiB; 0: model.model_config.num_blocks, and without that "
            "80 % of what the weights leave of the free memory, or of context.max_device_memory.",
            ge=0,
        ),
    ] = 0.0
    overlap: Annotated[
        bool,
        _doc(
            "Two groups of sequences take turns: one is sampled while the device computes the "
            "other. Off, for each group pays a step's fixed cost: it is faster only where sampling "
            "takes longer than that (benchmarks/engine_overlap.py), which it does not on CPU."
        ),
    ] = False
    prefix_cache: Annotated[bool, _doc("Share the KV blocks of equal prompt beginnings.")] = True
    priority_ageing: Annotated[
        float, _doc("Seconds of waiting that raise a request by one priority level.", gt=0)
    ] = 30.0
    token_timeout: Annotated[
        float, _doc("Seconds until the next token (MindIE's tokenTimeout).", gt=0, le=3600)
    ] = 600.0
    e2e_timeout: Annotated[
        float, _doc("Seconds for the whole request (MindIE's e2eTimeout).", gt=0, le=65_535)
    ] = 600.0
    drain_timeout: Annotated[
        float, _doc("Seconds that running requests get to end after SIGTERM.", ge=0, le=65_535)
    ] = 30.0
    engine_restarts: Annotated[
        int,
        _doc("Engine crashes in ten minutes of service after which it stays down.", ge=0, le=1000),
    ] = 5
    max_request_length: Annotated[
        int, _doc("MiB of a request body (MindIE's maxRequestLength).", ge=1, le=100)
    ] = 40
    max_json_depth: Annotated[
        int, _doc("Nesting of a request body (MindIE's maxJsonDepth).", ge=10, le=100)
    ] = 10
    compat: Annotated[CompatConfig, _doc("Faithful faults.")] = field(default_factory=CompatConfig)
    cpu: Annotated[CpuConfig, _doc("CPU kernels.")] = field(default_factory=CpuConfig)
    media: Annotated[MediaConfig, _doc("Multimodal input.")] = field(default_factory=MediaConfig)
    watermark: Annotated[WatermarkConfig, _doc("Watermark.")] = field(
        default_factory=WatermarkConfig
    )
    echo: Annotated[EchoConfig, _doc("The `echo` backend.")] = field(default_factory=EchoConfig)
