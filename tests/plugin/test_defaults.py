"""Where a sampling value comes from when a request does not say."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import pytest

from mindstream.plugin import service
from mindstream.plugin.defaults import Defaults, Rule, resolve_defaults
from mindstream.plugin.errors import ConfigError
from mindstream.plugin.model_config import Deployment, load_deployment
from mindstream.plugin.testing import ScriptedBackend

CONFIG = {"vocab_size": 1000}


def defaults(
    folder: Path,
    yaml: str = "use_legacy: False\n",
    *,
    config: dict[str, Any] | None = None,
    generation: dict[str, Any] | None = None,
    rule: Rule = "ms",
) -> Defaults:
    (folder / "m.yaml").write_text(yaml)
    (folder / "config.json").write_text(json.dumps(CONFIG if config is None else config))
    if generation is not None:
        (folder / "generation_config.json").write_text(json.dumps(generation))
    return resolve_defaults(load_deployment(folder), rule)


MCORE = "use_legacy: False\nmodel: {model_config: {top_k: 3}}\ngeneration_config: {top_k: 7}\n"
LEGACY = "model: {model_config: {top_k: 3, temperature: 0.5}}\ngeneration_config: {top_k: 7}\n"


class TestTopK:
    def test_ms_reads_the_mcore_yaml(self, tmp_path: Path) -> None:
        found = defaults(tmp_path, MCORE, generation={"top_k": 50}).top_k
        assert (found.value, found.source) == (7, "m.yaml: generation_config.top_k")

    def test_ms_reads_the_legacy_yaml(self, tmp_path: Path) -> None:
        found = defaults(tmp_path, LEGACY, generation={"top_k": 50})
        assert (found.top_k.value, found.temperature.value) == (3, 0.5)
        assert found.top_k.source == "m.yaml: model.model_config.top_k"

    def test_ms_never_reads_generation_config_json(self, tmp_path: Path) -> None:
        found = defaults(tmp_path, generation={"top_k": 50}, config={"top_k": 40}).top_k
        assert (found.value, found.source) == (0, "rule ms")

    def test_atb_prefers_generation_config_json(self, tmp_path: Path) -> None:
        config = {**CONFIG, "top_k": 40}
        found = defaults(tmp_path, MCORE, generation={"top_k": 50}, config=config, rule="atb")
        assert (found.top_k.value, found.top_k.source) == (50, "generation_config.json: top_k")

    def test_atb_then_config_json(self, tmp_path: Path) -> None:
        found = defaults(tmp_path, generation={}, config={"top_k": 40}, rule="atb").top_k
        assert (found.value, found.source) == (40, "config.json: top_k")

    def test_atb_then_1000(self, tmp_path: Path) -> None:
        found = defaults(tmp_path, MCORE, rule="atb").top_k
        assert (found.value, found.source) == (1000, "rule atb")

    @pytest.mark.parametrize(("declared", "top_k"), [(None, 0), ("ms", 0), ("atb", 1000)])
    def test_a_backend_declares_its_rule(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, declared: str | None, top_k: int
    ) -> None:
        class Factory(ScriptedBackend):
            def __init__(self, deployment: Deployment) -> None:
                super().__init__()

        if declared:
            monkeypatch.setattr(Factory, "defaults_rule", declared, raising=False)
        monkeypatch.setattr(service, "load_backend", lambda name: Factory)
        (tmp_path / "m.yaml").write_text("serving: {tokenizer: bytes}\n")
        (tmp_path / "config.json").write_text(json.dumps({"vocab_size": 5000}))
        found = service.open_service(load_deployment(tmp_path)).defaults.top_k
        assert (found.value, found.source) == (top_k, f"rule {declared or 'ms'}")

    def test_the_deployment_may_overrule_the_backend(self, tmp_path: Path) -> None:
        yaml = "use_legacy: False\nserving: {defaults_rule: atb}\n"
        assert defaults(tmp_path, yaml, rule="ms").rule == "atb"

    @pytest.mark.parametrize(
        ("given", "becomes"),
        [(1, 1), (999, 999), (1000, 1000), (1001, 1000), (2**31 - 1, 1000), (None, 0)],
    )
    def test_at_or_above_the_vocabulary_it_is_the_vocabulary(
        self, tmp_path: Path, given: int | None, becomes: int
    ) -> None:
        assert defaults(tmp_path).sampling(seed=1, top_k=given).top_k == becomes


class TestVocabulary:
    def test_padded_comes_second(self, tmp_path: Path) -> None:
        assert defaults(tmp_path, config={"padded_vocab_size": 5}).vocab_size.value == 5
        both = defaults(tmp_path, config={"padded_vocab_size": 5, "vocab_size": 4})
        assert both.vocab_size.value == 4

    def test_without_one_it_is_0_with_a_warning(
        self, tmp_path: Path, caplog: pytest.LogCaptureFixture
    ) -> None:
        with caplog.at_level(logging.WARNING):
            found = defaults(tmp_path, config={})
        assert found.vocab_size.value == 0
        assert "padded_vocab_size" in caplog.text and str(tmp_path) in caplog.text
        assert found.sampling(seed=1, top_k=10).top_k == 0


class TestDoSample:
    @pytest.mark.parametrize(
        "given", [{"temperature": 1.0}, {"top_k": 5}, {"top_p": 1.0}, {"typical_p": 0.5}]
    )
    def test_absent_it_follows_the_others(self, tmp_path: Path, given: dict[str, Any]) -> None:
        assert defaults(tmp_path).sampling(seed=1, **given).do_sample is True

    def test_absent_with_nothing_that_samples(self, tmp_path: Path) -> None:
        sampling = defaults(tmp_path).sampling(seed=1, repetition_penalty=1.5, watermark=True)
        assert sampling.do_sample is False and sampling.repetition_penalty == 1.5

    def test_given_it_wins(self, tmp_path: Path) -> None:
        found = defaults(tmp_path, "use_legacy: False\ngeneration_config: {do_sample: True}\n")
        assert found.sampling(seed=1).do_sample is True
        assert found.sampling(seed=1, do_sample=False, temperature=2.0).do_sample is False


def test_the_other_values_fall_from_yaml_to_json(tmp_path: Path) -> None:
    found = defaults(
        tmp_path,
        "use_legacy: False\ngeneration_config: {temperature: 0.7}\n",
        generation={"temperature": 0.1, "top_p": 0.8, "repetition_penalty": 1.05},
    )
    assert found.describe() == {
        "vocab_size": {"value": 1000, "source": "config.json: vocab_size"},
        "eos_token_ids": {"value": [], "source": "default"},
        "do_sample": {"value": False, "source": "default"},
        "temperature": {"value": 0.7, "source": "m.yaml: generation_config.temperature"},
        "top_k": {"value": 0, "source": "rule ms"},
        "top_p": {"value": 0.8, "source": "generation_config.json: top_p"},
        "typical_p": {"value": None, "source": "default"},
        "repetition_penalty": {
            "value": 1.05,
            "source": "generation_config.json: repetition_penalty",
        },
    }


class TestEndTokens:
    def test_both_json_files_together(self, tmp_path: Path) -> None:
        config = {**CONFIG, "eos_token_id": 9}
        found = defaults(tmp_path, config=config, generation={"eos_token_id": [9, 5]})
        assert found.eos_token_ids.value == (9, 5)
        assert "config.json" in found.eos_token_ids.source
        assert "generation_config.json" in found.eos_token_ids.source

    def test_the_yaml_wins(self, tmp_path: Path) -> None:
        yaml = "use_legacy: False\ngeneration_config: {eos_token_id: [1, 2]}\n"
        found = defaults(tmp_path, yaml, config={**CONFIG, "eos_token_id": 9})
        assert found.eos_token_ids.value == (1, 2)

    def test_minus_one_is_none(self, tmp_path: Path) -> None:
        yaml = "model: {model_config: {eos_token_id: -1}}\n"
        found = defaults(tmp_path, yaml, config={**CONFIG, "eos_token_id": 9})
        assert found.eos_token_ids.value == (9,)


@pytest.mark.parametrize(
    ("yaml", "config", "words"),
    [
        ("generation_config: {top_k: -1}", CONFIG, "m.yaml: generation_config.top_k must be"),
        ("generation_config: {top_k: true}", CONFIG, "but is True"),
        ("generation_config: {temperature: 0}", CONFIG, "a number > 1e-6, but is 0"),
        ("generation_config: {top_p: 1.5}", CONFIG, "(1e-6, 1.0], but is 1.5"),
        ("generation_config: {do_sample: 1}", CONFIG, "true or false, but is 1"),
        ("generation_config: {eos_token_id: x}", CONFIG, "a list of them, but is 'x'"),
        ("generation_config: 3", CONFIG, "generation_config must be a mapping, but is 3"),
        ("a: 1", {"vocab_size": "x"}, "config.json: vocab_size must be"),
    ],
)
def test_a_wrong_value_is_refused_at_start(
    tmp_path: Path, yaml: str, config: dict[str, Any], words: str
) -> None:
    with pytest.raises(ConfigError) as caught:
        defaults(tmp_path, "use_legacy: False\n" + yaml, config=config)
    assert words in str(caught.value)


def test_broken_json_names_the_file(tmp_path: Path) -> None:
    (tmp_path / "m.yaml").write_text("a: 1")
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(ConfigError, match=r"config\.json is not valid JSON"):
        resolve_defaults(load_deployment(tmp_path))
