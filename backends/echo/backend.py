"""`EchoBackend`: the shared engine over `EchoStepModel`, and the mark on each prompt's end."""

from __future__ import annotations

from dataclasses import replace

from mindstream.backends.echo.vocabulary import vocabulary_of
from mindstream.backends.engine import EngineBackend
from mindstream.backends.engine.stream import EngineStream
from mindstream.plugin.backend import Limits
from mindstream.plugin.model_config import Deployment
from mindstream.plugin.request import GenerationRequest

_STEP_MODEL = "mindstream.backends.echo.step_model:EchoStepModel"


class EchoBackend(EngineBackend):
    """Answers every prompt with its own tokens and then ends (FinishReason.EOS)."""

    def __init__(self, deployment: Deployment) -> None:
        super().__init__(deployment, _STEP_MODEL)
        self._vocabulary = vocabulary_of(deployment)

    @property
    def limits(self) -> Limits:
        """The ids a prompt may use, without the echo's own."""
        return replace(super().limits, vocab_size=self._vocabulary.size)

    def submit(self, request: GenerationRequest) -> EngineStream:
        """See `Backend.submit`. Ends behind the echo, whatever the request's own end tokens are."""
        ids = list(request.prompt_ids)
        ids[-1 - request.generated_before] += self._vocabulary.size
        marked = replace(request, prompt_ids=tuple(ids), eos_token_ids=(self._vocabulary.end,))
        return super().submit(marked)
