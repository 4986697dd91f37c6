"""Deployments: what is found, what is refused, and with which words."""

from __future__ import annotations

import pickle
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mindstream.plugin.errors import ConfigError
from mindstream.plugin.field_check import field_paths
from mindstream.plugin.model_config import Deployment, load_deployment, shipped_names
from mindstream.plugin.serving_config import ServingConfig


def load(folder: Path, text: str, **overrides: str) -> Deployment:
    file = folder / "deployment.yaml"
    file.write_text(text, encoding="utf-8")
    return load_deployment(file, overrides)


def refusal(folder: Path, text: str, **overrides: str) -> str:
    with pytest.raises(ConfigError) as caught:
        load(folder, text, **overrides)
    return str(caught.value)


@pytest.mark.parametrize("name", shipped_names())
def test_every_shipped_deployment_loads_under_its_own_name(name: str) -> None:
    assert load_deployment(name).name == name


def test_defaults_apply_without_a_serving_block(tmp_path: Path) -> None:
    deployment = load(tmp_path, "use_legacy: False\n")
    assert deployment.serving == ServingConfig()
    assert deployment.mindformers == {"use_legacy": False}
    assert deployment.name == "deployment"


def test_an_empty_value_means_the_default(tmp_path: Path) -> None:
    assert load(tmp_path, "serving:\n  cpu:\n  name:\n").serving == ServingConfig()


def test_a_deployment_crosses_processes(tmp_path: Path) -> None:
    deployment = load(tmp_path, "a: {b: [1, 2]}\nserving: {cpu: {threads: 2}}\n")
    assert pickle.loads(pickle.dumps(deployment)) == deployment


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("serving: {maxSeqLen: 9}", ["serving.maxSeqLen", "serving.max_seq_len"]),
        ("serving: {tokenTimeout: 9}", ["serving.token_timeout"]),
        ("serving: {npuMemSize: 9}", ["serving.kv_cache_gib"]),
        ("serving: {modelWeightPath: x}", ["serving.model_weight_path"]),
        ("serving: {max_batchsize: 9}", ["serving.max_batch_size"]),
        ("serving: {cpu: {thread: 9}}", ["serving.cpu.thread;", "key is serving.cpu.threads."]),
        ("serving: {threads: 9}", ["serving.threads", "serving.cpu.threads"]),
        ("servings: {name: x}", ["'servings'", "'serving'"]),
        ("serving: {1: x}", ["serving.1"]),
    ],
)
def test_an_unknown_key_is_told_the_nearest(tmp_path: Path, text: str, words: list[str]) -> None:
    message = refusal(tmp_path, text)
    assert "unknown key" in message and "deployment.yaml" in message
    for word in words:
        assert word in message


@pytest.mark.parametrize(
    ("text", "field", "bound", "value"),
    [
        ("max_batch_size: 0", "max_batch_size", "[1, 4096]", "0"),
        ("max_batch_size: 4097", "max_batch_size", "[1, 4096]", "4097"),
        ("max_batch_size: true", "max_batch_size", "a whole number", "True"),
        ("max_batch_size: 1.0", "max_batch_size", "a whole number", "1.0"),
        ("max_batch_size: '8'", "max_batch_size", "a whole number", "'8'"),
        ("max_batch_size: [1]", "max_batch_size", "a whole number", "a list of 1"),
        ("prefix_cache: 1", "prefix_cache", "true or false", "1"),
        ("token_timeout: 0", "token_timeout", "(0, 3600]", "0"),
        ("token_timeout: .nan", "token_timeout", "finite", "nan"),
        ("priority_ageing: .inf", "priority_ageing", "finite", "inf"),
        ("name: a b", "name", "matching", "'a b'"),
        ("name: 7", "name", "text", "7"),
        ("cpu: {weights: f16}", "cpu.weights", "`bf16`, `int8`, `f32`", "'f16'"),
        ("cpu: {threads: -1}", "cpu.threads", "[0, 1024]", "-1"),
        ("cpu: 3", "cpu", "a mapping", "3"),
        ("watermark: {gamma: 1}", "watermark.gamma", "(0, 1)", "1"),
    ],
)
def test_a_wrong_value_names_field_bound_and_value(
    tmp_path: Path, text: str, field: str, bound: str, value: str
) -> None:
    message = refusal(tmp_path, "serving: {" + text + "}")
    assert f"serving.{field} must be" in message
    assert bound in message
    assert message.endswith(f"but is {value}.")


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("a: [", "line 1"),
        ("a: 1\nb: 2\na: 3\n", "'a' appears twice, in lines 1 and 3"),
        ("serving:\n  name: x\n  name: y\n", "lines 2 and 3"),
        ("- 1\n", "a list of 1"),
        ("", "holds nothing"),
        ("just words", "'just words'"),
        ("a: !!python/object:os.system x", "constructor"),
        ("a: 2020-99-99", "not valid yaml"),
        ("? [1]\n: 2", "plain value"),
        ("a: b\n---\nc: d", "single document"),
        ("a: " + "[" * 5000, "yaml"),
    ],
)
def test_what_is_not_yaml_names_file_and_place(tmp_path: Path, text: str, words: str) -> None:
    message = refusal(tmp_path, text)
    assert "deployment.yaml" in message and words in message and "\n" not in message


def test_bytes_that_are_not_text(tmp_path: Path) -> None:
    (tmp_path / "d.yaml").write_bytes(b"a: \xff")
    with pytest.raises(ConfigError, match=r"d\.yaml is not a yaml file: byte 3"):
        load_deployment(tmp_path / "d.yaml")


@given(st.text())
def test_any_text_loads_or_is_refused(tmp_path_factory: pytest.TempPathFactory, text: str) -> None:
    folder = tmp_path_factory.getbasetemp()
    try:
        load(folder, text.encode("utf-8", "ignore").decode())
    except ConfigError as error:
        assert "deployment.yaml" in str(error)


SCALARS = st.one_of(
    st.none(), st.booleans(), st.integers(), st.floats(), st.text("abc", max_size=3)
)


@given(st.dictionaries(st.sampled_from([n for n, _ in field_paths(ServingConfig)]), SCALARS))
def test_any_values_load_or_are_refused(
    tmp_path_factory: pytest.TempPathFactory, values: dict[str, object]
) -> None:
    import yaml

    block: dict[str, object] = {}
    for name, value in values.items():
        head, _, tail = name.partition(".")
        inner = block.setdefault(head, {}) if tail else block
        if isinstance(inner, dict):
            inner[tail or head] = value
    try:
        load(tmp_path_factory.getbasetemp(), yaml.safe_dump({"serving": block}))
    except ConfigError as error:
        assert "serving." in str(error)


class TestDirectory:
    def test_exactly_one_yaml(self, tmp_path: Path) -> None:
        (tmp_path / "predict.yaml").write_text("serving: {name: m}\n")
        (tmp_path / "config.json").write_text("{}")
        deployment = load_deployment(tmp_path)
        assert deployment.path == tmp_path / "predict.yaml"
        assert deployment.model_dir == tmp_path

    def test_none_lists_what_is_there(self, tmp_path: Path) -> None:
        (tmp_path / "config.json").write_text("{}")
        (tmp_path / "sub").mkdir()
        with pytest.raises(ConfigError, match=r"holds none; it holds: config\.json, sub/"):
            load_deployment(tmp_path)

    def test_none_in_an_empty_one(self, tmp_path: Path) -> None:
        with pytest.raises(ConfigError, match="nothing at all"):
            load_deployment(tmp_path)

    def test_several_lists_them(self, tmp_path: Path) -> None:
        for name in ("b.yaml", "a.yaml"):
            (tmp_path / name).write_text("{}")
        with pytest.raises(ConfigError, match=r"holds 2: a\.yaml, b\.yaml"):
            load_deployment(tmp_path)

    def test_neither_file_nor_folder_nor_name(self) -> None:
        with pytest.raises(ConfigError, match=r"'qwen3-8' is neither.*qwen3-8b.*Did you mean"):
            load_deployment("qwen3-8")


class TestWeightDirectory:
    def test_pretrained_model_dir_starts_at_the_yaml(self, tmp_path: Path) -> None:
        deployment = load(tmp_path, "pretrained_model_dir: weights\n")
        assert deployment.model_dir == tmp_path / "weights"

    def test_the_home_folder_is_expanded(self, tmp_path: Path) -> None:
        deployment = load(tmp_path, "pretrained_model_dir: ~/w\n")
        assert deployment.model_dir == Path.home() / "w"

    def test_serving_wins(self, tmp_path: Path) -> None:
        text = "pretrained_model_dir: a\nserving: {model_weight_path: /b}\n"
        assert load(tmp_path, text).model_dir == Path("/b")

    def test_a_missing_one_is_replaced_by_the_pulled(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setenv("MINDSTREAM_CACHE", str(tmp_path / "cache"))
        text = "pretrained_model_dir: here\nserving: {pull: demo}\n"
        assert load(tmp_path, text).model_dir == tmp_path / "cache/models/demo"
        (tmp_path / "here").mkdir()
        assert load(tmp_path, text).model_dir == tmp_path / "here"

    def test_a_file_beside_its_weights(self, tmp_path: Path) -> None:
        assert load(tmp_path, "serving: {}").model_dir is None
        (tmp_path / "config.json").write_text("{}")
        assert load(tmp_path, "serving: {}").model_dir == tmp_path

    def test_a_wrong_type_is_named(self, tmp_path: Path) -> None:
        assert "pretrained_model_dir must be text" in refusal(tmp_path, "pretrained_model_dir: 3")


class TestOverrides:
    def test_serving_fields_with_and_without_the_block(self, tmp_path: Path) -> None:
        overrides = {"max_batch_size": "8", "serving.cpu.threads": "2"}
        deployment = load(tmp_path, "a: 1", **overrides)
        assert deployment.serving.max_batch_size == 8
        assert deployment.serving.cpu.threads == 2

    def test_mindformers_values(self, tmp_path: Path) -> None:
        deployment = load(tmp_path, "model: {a: 1}", **{"model.model_config.num_blocks": "64"})
        assert deployment.mindformers == {"model": {"a": 1, "model_config": {"num_blocks": 64}}}

    def test_they_are_checked_like_the_file(self, tmp_path: Path) -> None:
        assert "[1, 4096], but is 0" in refusal(tmp_path, "a: 1", max_batch_size="0")

    def test_a_misspelt_field_is_told_the_nearest(self, tmp_path: Path) -> None:
        message = refusal(tmp_path, "a: 1", max_batch_sise="8")
        assert message.startswith("--set max_batch_sise: unknown key")
        assert "'max_batch_size'" in message

    @pytest.mark.parametrize(
        ("key", "meant"),
        [
            ("maxSeqLen", "max_seq_len"),
            ("maxBatchSize", "max_batch_size"),
            ("threads", "cpu.threads"),
            ("weights", "cpu.weights"),
        ],
    )
    def test_a_field_under_another_name_is_told_its_own(
        self, tmp_path: Path, key: str, meant: str
    ) -> None:
        assert f"Did you mean {meant!r}?" in refusal(tmp_path, "a: 1", **{key: "1"})

    def test_a_path_through_a_value_is_refused(self, tmp_path: Path) -> None:
        message = refusal(tmp_path, "model: 3", **{"model.model_config.x": "1"})
        assert message == "--set model.model_config.x: model is 3, not a mapping."
