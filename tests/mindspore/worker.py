"""A process that owns one StepModel, driven by pickles on stdin and stdout. Not a test.

MindSpore must be called from one thread, warns when it is imported and keeps a global context: so
every model of the tests has a process of its own.
"""

from __future__ import annotations

import logging
import os
import pickle
import sys
import tracemalloc
from typing import Any


class Lines(logging.Handler):
    """What mindstream logged since the last load began."""

    def __init__(self) -> None:
        super().__init__()
        self.kept: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.kept.append(f"{record.levelname} {record.getMessage()}")


def watch(model: Any, batch: Any, rows: list[Any]) -> dict[str, Any]:
    """A step and the sampling of `rows`: `shared` if the logits are the memory of the tensor that
    the graph gave, and the most that Python and NumPy allocated meanwhile.
    """
    from mindspore import Tensor

    from mindstream.backends.engine.sampler import Sampler

    given: list[Any] = []
    asnumpy = Tensor.asnumpy

    def noted(tensor: Any) -> Any:
        given.append(tensor)
        return asnumpy(tensor)

    Tensor.asnumpy = noted
    tracemalloc.start()
    try:
        logits = model.forward(batch)
        tokens = Sampler(None).sample(logits, rows) if rows else []
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
        Tensor.asnumpy = asnumpy
    (tensor,) = given
    shared = tensor.data_ptr() == logits.ctypes.data
    return {"shared": shared, "logits": logits.nbytes, "peak": peak, "tokens": tokens}


def main() -> None:
    """Answers ("ok", value) or ("error", class name, message) to every command until stdin ends."""
    answers = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # whatever prints from here on goes to stderr
    commands = sys.stdin.buffer
    from mindstream.backends.mindspore.step_model import MindSporeStepModel
    from mindstream.plugin.errors import MindstreamError
    from mindstream.plugin.model_config import load_deployment

    model: Any = None
    lines = Lines()
    log = logging.getLogger("mindstream")
    log.addHandler(lines)
    log.setLevel(logging.INFO)
    while True:
        try:
            command, *arguments = pickle.load(commands)
        except EOFError:
            return
        try:
            if command == "load":
                lines.kept.clear()
                model = MindSporeStepModel(load_deployment(*arguments))
                result: Any = model.load()
            elif command == "compiled":
                from mindspore.graph.api import cells_compile_cache

                result = sum(map(len, cells_compile_cache.values()))  # graphs of living cells
            elif command == "instruction_set":
                from mindstream.backends.mindspore.cpu.library import instruction_set

                result = instruction_set()
            elif command == "watch":
                result = watch(model, *arguments)
            elif command == "logged":
                result = lines.kept
            elif command == "imported":
                result = arguments[0] in sys.modules
            else:
                result = getattr(model, command)(*arguments)
            answer: tuple[Any, ...] = ("ok", result)
        except (MindstreamError, RuntimeError, ValueError) as error:
            answer = ("error", type(error).__name__, str(error))
        pickle.dump(answer, answers)
        answers.flush()


if __name__ == "__main__":
    main()
