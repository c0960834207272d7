"""A configuration is read exactly or refused with one line that names the key, the place and the remedy."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from pretrain.config.data_schema import Data, MixtureStage, Source
from pretrain.config.foreign import value_advice
from pretrain.config.load import load_config
from pretrain.config.read import dump, origin_of
from pretrain.config.schema import Config, Model, Run
from pretrain.config.written import to_yaml
from pretrain.errors import ConfigError
from pretrain.run import main


@pytest.fixture
def write(tmp_path):
    """write(text, name) -> path of a configuration file."""

    def write_file(text: str, name: str = "run.yaml") -> Path:
        (tmp_path / name).parent.mkdir(exist_ok=True, parents=True)
        (tmp_path / name).write_text(text, encoding="utf-8")
        return tmp_path / name

    return write_file


def refused(path: Path | None, *overrides: str) -> str:
    with pytest.raises(ConfigError) as caught:
        load_config(path, list(overrides))
    message = str(caught.value)
    assert "\n" not in message
    return message


def loaded(*overrides: str) -> Config:
    return load_config(None, list(overrides))[0]


# ---- unknown keys -----------------------------------------------------------------------------------------------------


def test_an_unknown_key_is_named_with_its_path_its_line_and_the_nearest_name(write):
    path = write("run:\n  steps: 3\noptim:\n  lr: 1e-3\n  weight_decy: 0\n")
    assert refused(path) == f"{path}:5: unknown key optim.weight_decy; the nearest valid name is optim.weight_decay"


def test_an_unknown_key_in_a_list_item_is_named_with_its_index(write):
    path = write("data:\n  sources:\n    - path: a\n    - path: b\n      weihgt: 2\n")
    assert refused(path) == f"{path}:5: unknown key data.sources.1.weihgt; the nearest valid name is data.sources.1.weight"


@pytest.mark.parametrize(
    "override, key, nearest",
    [
        ("model.dmi=1", "model.dmi", "the nearest valid name is model.dim"),
        ("modle.dim=1", "modle", "the nearest valid name is model"),
        ('optim.groups=[{pattern:"a.*"}]', 'optim.groups.0.pattern:"a.*"', 'YAML wants a space after a colon: pattern: "a.*"'),
        ('optim.groups=[{pattern: "*", lr: 2}]', "optim.groups.0.lr", "the nearest valid name is optim.groups.0.lr_scale"),
        ("data.sources=[{paht: a}]", "data.sources.0.paht", "the nearest valid name is data.sources.0.path"),
        ("model.foo.bar=1", "model.foo", "valid names here: family, hf_config, dim, layers"),
        ("sequence_length=1", "sequence_length", "the nearest valid name is data.sequence_length"),
        ("model.sequence_length=1", "model.sequence_length", "the nearest valid name is data.sequence_length"),
        ("parallel.bucket_mb=1", "parallel.bucket_mb", "the nearest valid name is parallel.ddp.bucket_mb"),
        ("batch.foo=4", "batch.foo", "valid names here: sequences, micro_sequences"),
        ("include=other.yaml", "include", "valid names here: run, model"),
    ],
)
def test_an_unknown_key_on_the_command_line_is_named_too(override, key, nearest):
    assert refused(None, override).startswith(f"command line: unknown key {key}; {nearest}")


def test_an_unknown_key_of_the_command_line_is_not_blamed_on_the_file_that_has_its_section(write):
    assert refused(write("model: {dim: 8}\n"), "model.foo.bar=1").startswith("command line: unknown key model.foo")


# ---- types and ranges -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "override, remedy",
    [
        ("run.steps=1e-4", "run.steps=0.0001: expected int"),
        ("run.steps=1.5", "expected int"),
        ("run.steps=ten", "run.steps=ten: expected int"),
        ("run.steps=true", "run.steps=true: expected int"),
        ("run.steps=null", "run.steps=null: expected int"),
        ("run.steps=yes", "run.steps='yes': expected int"),
        ("run.steps='12'", "run.steps='12': expected int"),
        ("run.steps=0x10", "expected int"),
        ("run.steps=[3]", "run.steps=[3]: expected int"),
        ("run.steps={a: 3}", "run.steps={a: 3}: expected int"),
        ("run.steps.a=3", "run.steps={a: 3}: expected int"),
        ("run.steps=0", "run.steps=0: must be at least 1"),
        ("run.name=true", "run.name=true: expected str or null"),
        ("run.dir=null", "run.dir=null: expected str"),
        ("run.dir=[a]", "expected str"),
        ("log.tensorboard=yes", "log.tensorboard='yes': expected bool (true or false)"),
        ("log.tensorboard=on", "expected bool (true or false)"),
        ("log.tensorboard=1", "log.tensorboard=1: expected bool (true or false)"),
        ("log.tensorboard='true'", "expected bool (true or false)"),
        ("optim.lr=fast", "optim.lr=fast: expected float"),
        ("optim.lr=nan", "optim.lr=nan: must be a finite number"),
        ("optim.lr=.nan", "must be a finite number"),
        ("optim.lr=inf", "must be a finite number"),
        ("optim.lr=-.inf", "must be a finite number"),
        ("optim.lr=1e400", "must be a finite number"),
        ("optim.lr=0", "optim.lr=0: must be above 0"),
        ("optim.betas=0.9", "expected list[float] of 2"),
        ("optim.betas=[0.9]", "optim.betas=[0.9]: expected list[float] of 2"),
        ("optim.betas=[0.9, 0.95, 0.99]", "expected list[float] of 2"),
        ("optim.betas=[0.9, true]", "expected list[float] of 2"),
        ("optim.betas=[0.9, null]", "expected list[float] of 2"),
        ("optim.betas=[0.9, .nan]", "must be a finite number"),
        ("optim.betas=[0.9, 1.0]", "optim.betas=[0.9, 1.0]: must be below 1"),
        ("optim.betas=[-0.1, 0.9]", "must be at least 0"),
        ("schedule.min_ratio=1.01", "schedule.min_ratio=1.01: must be at most 1"),
        ("data.workers=65", "data.workers=65: must be at most 64"),
        ("model.head_dim=0", "model.head_dim=0: must be at least 1"),
        ("log.gradients_at=3", "log.gradients_at=3: expected list[int]"),
        ("log.gradients_at=[1, 1.5]", "expected list[int]"),
        ("log.gradients_at=[true]", "expected list[int]"),
        ("log.gradients_at=[3, 0]", "must be at least 1"),
        ("log.gradients_at.0=3", "expected list[int]"),
        ("data.sources=corpus", "data.sources is a list, got corpus; write [{...}] or one `- ` per item"),
        ("data.sources=null", "data.sources is a list, got null"),
        ("data.sources=[corpus]", "data.sources.0 is a section with keys (path, name, weight, tokens, loss_weight, max_epochs), got corpus"),
        ("data.sources=[{name: a}]", "data.sources.0.path is missing: Directory written by tools/prepare_data.py"),
        ("data.sources.0.path=a", "data.sources is a list, got {'0': {path: a}}"),
        ("data.sources=[{path: a, weight: -1}]", "data.sources.0.weight=-1: must be at least 0"),
        ("model=3", "model is a section with keys (family, hf_config, dim"),
        ("model=null", "model is a section with keys (family, hf_config, dim"),
        ("model.rope=1", "model.rope is a section with keys (theta, local_theta, fraction"),
        ("model.family=Llama", "the nearest of these is llama"),
        ("precision.compute=BF16", "the nearest of these is bf16"),
        ("optim.lr='1e-3'", "write the number without quotes"),
        ("optim.betas=0.9,0.95", "a list is written in brackets: [0.9,0.95]"),
        ("parallel=fsdp", "the key for that is parallel.strategy"),
        ("log.wandb=mine", "the key for that is log.wandb.project"),
        ("data.sources=[corpus]", "write {path: corpus}"),
        ("run='steps: 5'", "YAML wants a space after a colon: steps: 5"),
        ("run.dir=$HOME/runs", "$HOME would be the name of a folder here"),
        ("run.name='???'", "has a meaning of its own"),
        ("run.name='\\${x}'", "has a meaning of its own"),
    ],
)
def test_a_value_of_the_wrong_type_or_out_of_range_is_refused(override, remedy):
    message = refused(None, override)
    assert message.startswith(f"command line: {override.split('=')[0].split('.')[0]}")
    assert remedy in message


def test_a_number_of_hundreds_of_digits_is_refused():
    """It was an OverflowError."""
    message = refused(None, f"run.steps={400 * '9'}")
    assert message.startswith("command line: run.steps=999") and "must be at most" in message


@pytest.mark.parametrize("text", ["\\0", "a\\uD800"])
def test_a_character_that_no_text_may_have_is_refused(text):
    """Found by a campaign: run.resume="\\0" ended in a traceback. Later the message did not say where it was written."""
    message = refused(None, f'run.resume="{text}"')
    assert message.startswith("command line: run.resume=") and message.endswith("a character that is not allowed in file names and texts")


@pytest.mark.parametrize(
    "override, legal",
    [
        ("parallel.strategy=both", "one of auto, single, ddp, fsdp"),
        ("data.packing=Padded", "one of concatenate, best_fit, padded; the nearest of these is padded"),
        ("precision.compute=16", "one of fp32, bf16, auto"),
        ("precision.compute=null", "one of fp32, bf16, auto"),
        ("optim.name=[adamw]", "one of adamw, lion, muon, adafactor, schedule_free_adamw"),
    ],
)
def test_a_choice_that_does_not_exist_is_answered_with_those_that_do(override, legal):
    assert refused(None, override) == f"command line: {override}: expected {legal}"


@pytest.mark.parametrize(
    "override, proposed",
    [
        ("run.steps=010", "10"),
        ("run.steps=-007", "-7"),
        ("run.seed=00", "0"),
        ("optim.lr=01.5", "1.5"),
        ("optim.lr=01e-3", "1e-3"),
        ("model.kv_heads=04", "4"),
        ("log.gradients_at=[1, 010]", "10"),
    ],
)
def test_a_number_with_a_leading_zero_is_refused_with_the_number_it_may_mean(override, proposed):
    assert refused(None, override).endswith(f"a number with a leading zero is 8-based to some readers; write {proposed}")


def test_a_wrong_value_in_a_file_is_named_with_its_line(write):
    path = write("run:\n  name: a\n  steps: yes\n")
    assert refused(path) == f"{path}:3: run.steps='yes': expected int"


@pytest.mark.parametrize(
    "text, value", [("1e3", 1000), ("1_000", 1000), ("+5", 5), ("2.0", 2), ("1E1", 10), ("7", 7), ("  8", 8)]
)
def test_a_whole_number_may_be_written_in_any_way(text, value):
    steps = loaded(f"run.steps={text}").run.steps
    assert (steps, type(steps)) == (value, int)
    assert loaded(f"log.gradients_at=[{text}]").log.gradients_at == [value]


@pytest.mark.parametrize("text, value", [("1e-4", 1e-4), ("3", 3.0), (".5", 0.5), ("1.", 1.0), ("2E-3", 2e-3), ("+1e0", 1.0)])
def test_a_number_is_read_as_yaml_1_2_reads_it(text, value):
    rate = loaded(f"optim.lr={text}").optim.lr
    assert (rate, type(rate)) == (value, float)


TRICKY = ["1e-4", "1e3", "yes", "no", "on", "010", "0x1F", "2024_01", "1_000", "2024-01-01", "3.10", "1:30", "+5", ".5", "a-1"]


@pytest.mark.parametrize("text", TRICKY)
def test_a_text_is_kept_as_it_was_written(write, text):
    assert loaded(f"run.name={text}").run.name == text
    path = write(f"run:\n  name: {text}\ndata: {{sources: [{{path: {text}}}]}}\n")
    config, _ = load_config(path)
    assert (config.run.name, config.data.sources[0].path) == (text, text)
    assert loaded(f"data.sources=[{{path: {text}}}]").data.sources[0].path == text
    assert loaded("log.wandb.project=p", f"log.wandb.tags=[{text}, {text}]").log.wandb.tags == [text, text]


@pytest.mark.parametrize("override", ["run.dir=~/runs", "data.sources=[{path: ~/data}]", "data.text.input=[a, ~/b]", "run.init_from='~/a b'"])
def test_a_folder_of_the_user_is_not_taken_for_one_called_tilde(override):
    """A shell does not expand it after `=` either."""
    with pytest.raises(ConfigError, match=rf"~ would be the name of a folder here; write {Path.home()}"):
        loaded(override)


@pytest.mark.parametrize("text", ["null", "~", "", "Null"])
def test_null_means_derived(text):
    assert loaded("run.name=a", f"run.name={text}").run.name is None
    assert loaded(f"model.kv_heads={text}").model.kv_heads is None


def test_the_name_of_a_run_is_the_stem_of_its_file_unless_it_says_otherwise(write):
    path = write("run: {steps: 3}\n", "small.model.yaml")
    assert load_config(path)[0].run.name == "small.model"
    assert load_config(path, ["run.name=other"])[0].run.name == "other"


# ---- files ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "text, problem",
    [
        ("run: {steps: 3}\nrun: {seed: 1}\n", ":2: run is written twice"),
        ("run:\n  steps: 3\n  seed: 1\n  steps: 3\n", ":4: run.steps is written twice"),
        ("data: {sources: [{path: a, path: b}]}\n", ":1: data.sources.0.path is written twice"),
        ("- a\n", ":1: a configuration is a mapping of sections, got a list"),
        ("run", ":1: a configuration is a mapping of sections, got a single value"),
        ("run: {steps: 3\n", ":2: not valid YAML: expected ',' or '}', but got '<stream end>'"),
        ("model: &x\n  rope: *x\n", ":1: model.rope is an alias of what it is in; write its own value"),
        ("data: {sources: " + 2000 * "[" + 2000 * "]" + "}\n", ": brackets or sections are nested too deeply"),
        ("run:\n\tsteps: 3\n", ":2: not valid YAML: found character '\\t' that cannot start any token; indent with spaces"),
        ("run.steps: 3\n", ":1: unknown key run.steps; a key in a file has no dots: write run: {steps: ...}"),
        ("model.rope.theta: 3\n", ":1: unknown key model.rope.theta; a key in a file has no dots: write model: {rope: {theta: ...}}"),
        ("run: {}\n---\nrun: {}\n", ":2: not valid YAML: but found another document"),
        ("run:\n", ":1: run is a section with keys (name, dir"),
        ("run: {name: !!python/name:os.system }\n", ":1: not valid YAML: could not determine a constructor"),
        ("run: {name: a\x00b}\n", ": not valid YAML: unacceptable character #x0000"),
        ("? [a, b]\n: 3\n", ":1: a key is a name, got a list"),
        ("run: {{a: b}: 3}\n", ":1: a key in run is a name, got a mapping"),
        ("run: {steps: !!int abc}\n", ":1: run.steps: abc cannot be read as int"),
        ("run: {deterministic: !!bool maybe}\n", ":1: run.deterministic: maybe cannot be read as bool"),
        ("run: {name: !!timestamp abc}\n", ":1: run.name: abc cannot be read as timestamp"),
        ("run: {steps: " + 5000 * "9" + "}\n", ":1: run.steps: " + 40 * "9" + "... (5,000 characters) cannot be read as int"),
        ('run: {name: "\\UFFFFFFFF"}\n', ": a character in it (\\U...) does not exist"),
    ],
)
def test_a_file_that_says_something_twice_or_is_no_yaml_is_refused_with_the_line(write, text, problem):
    path = write(text)
    assert refused(path).startswith(f"{path}{problem}")


def test_a_few_lines_of_aliases_that_stand_for_billions_of_values_are_refused(write):
    """A hostile tester's ten lines took all memory."""
    lines, before = ["run: {steps: 3}", "a: &a [x,x,x,x,x,x,x,x,x,x]"], "a"
    for number in range(9):
        lines.append(f"b{number}: &b{number} [{','.join(['*' + before] * 10)}]")
        before = f"b{number}"
    path = write("\n".join(lines))
    assert refused(path) == f"{path}:2: more than 200,000 values, those of aliases counted each time; write fewer"
    many = ", ".join("{path: a}" for _ in range(20_000))
    assert len(load_config(write(f"data: {{sources: [{many}]}}"))[0].data.sources) == 20_000


def test_a_file_that_cannot_be_read_is_named(tmp_path):
    missing = tmp_path / "nothing.yaml"
    assert refused(missing) == f"{missing}: cannot read this configuration file: No such file or directory"
    assert refused(tmp_path).endswith("cannot read this configuration file: Is a directory")
    (tmp_path / "loop.yaml").symlink_to("loop.yaml")
    assert refused(tmp_path / "loop.yaml").endswith("cannot read this configuration file: Too many levels of symbolic links")
    missing.write_bytes(b"run: {name: \xff}")
    assert "cannot read this configuration file: 'utf-8' codec" in refused(missing)


def test_an_empty_file_is_the_defaults(write):
    assert load_config(write("# nothing\n", "run.yaml"))[0] == Config(run=Run(name="run"))


def test_an_include_is_relative_to_its_file_and_what_includes_it_wins(write):
    write("run: {steps: 1, seed: 1}\nmodel: {dim: 64, rope: {theta: 500.0}}\n", "parts/base.yaml")
    path = write("include: parts/base.yaml\nrun: {seed: 2}\nmodel: {layers: 3}\n")
    config, _ = load_config(path)
    assert (config.run.steps, config.run.seed) == (1, 2)
    assert (config.model.dim, config.model.layers, config.model.rope.theta) == (64, 3, 500.0)


def test_of_several_includes_later_ones_win_and_includes_nest(write):
    write("run: {steps: 1, seed: 1}\n", "parts/one.yaml")
    write("include: one.yaml\nrun: {seed: 2}\nbatch: {sequences: 4}\n", "parts/two.yaml")
    write("run: {steps: 3}\n", "three.yaml")
    config, _ = load_config(write("include: [parts/two.yaml, three.yaml]\nbatch: {micro_sequences: 2}\n"))
    assert (config.run.steps, config.run.seed, config.batch.sequences, config.batch.micro_sequences) == (3, 2, 4, 2)
    config, _ = load_config(write("include: [three.yaml, parts/two.yaml]\n"))
    assert (config.run.steps, config.run.seed) == (1, 2)


def test_lists_are_replaced_and_their_old_items_leave_no_trace(write):
    write("data:\n  sources:\n    - {path: a, weight: 3}\n    - {path: b}\nlog: {gradients_at: [1, 2]}\n", "base.yaml")
    path = write("include: base.yaml\n\n\ndata: {sources: [{path: c}]}\nlog: {gradients_at: []}\n")
    config, origins = load_config(path)
    assert config.data.sources == [Source(path="c")]
    assert config.log.gradients_at == []
    assert origin_of("data.sources.0.path", origins) == f"{path}:4"
    assert not any(name.startswith("data.sources.1") or name == "data.sources.0.weight" for name in origins)


def test_an_include_that_is_missing_or_goes_in_a_circle_is_refused(write, tmp_path):
    path = write("run: {}\ninclude: nothing.yaml\n")
    assert refused(path) == f"{path}:2: include=nothing.yaml: there is no file {tmp_path / 'nothing.yaml'}"
    assert ": there is no file " in refused(write(f"include: {300 * 'a'}\n"))
    write("include: [b.yaml]\n", "a.yaml")
    write("include: c.yaml\n", "b.yaml")
    write("include: a.yaml\n", "c.yaml")
    assert refused(tmp_path / "a.yaml").endswith("include goes in a circle: a.yaml -> b.yaml -> c.yaml -> a.yaml")
    path = write("include: {file: a.yaml}\n")
    assert refused(path) == f"{path}:1: include must be a file name or a list of them, got {{'file': 'a.yaml'}}"


def test_two_includes_of_the_same_file_are_no_circle(write):
    write("run: {steps: 7}\n", "base.yaml")
    write("include: base.yaml\n", "one.yaml")
    write("include: base.yaml\nrun: {seed: 3}\n", "two.yaml")
    config, _ = load_config(write("include: [one.yaml, two.yaml]\n"))
    assert (config.run.steps, config.run.seed) == (7, 3)


def test_an_error_in_an_included_file_names_that_file(write, tmp_path):
    write("run:\n  stpes: 7\n", "base.yaml")
    assert refused(write("include: base.yaml\n")).startswith(f"{tmp_path / 'base.yaml'}:2: unknown key run.stpes")


# ---- overrides --------------------------------------------------------------------------------------------------------


def test_later_overrides_win_over_earlier_ones_and_over_the_file(write):
    config, _ = load_config(write("run: {steps: 1, seed: 5}\n"), ["run.steps=2", "run.steps=3"])
    assert (config.run.steps, config.run.seed) == (3, 5)


def test_an_override_of_a_section_is_merged_into_it(write):
    config, _ = load_config(write("model: {layers: 3, rope: {theta: 5.0}}\n"), ["model={dim: 8, rope: {}}"])
    assert (config.model.dim, config.model.layers, config.model.rope.theta) == (8, 3, 5.0)


def test_an_override_reaches_into_a_list(write):
    path = write("data:\n  sources:\n    - path: a\n      weight: 3\n    - path: b\n")
    config, origins = load_config(path, ["data.sources.1.weight=0.5", "data.sources.0={path: c}"])
    assert config.data.sources == [Source(path="c", weight=3.0), Source(path="b", weight=0.5)]
    assert origin_of("data.sources.0.path", origins) == "command line"
    assert origin_of("data.sources.0.weight", origins) == f"{path}:4"
    assert loaded("log.gradients_at=[1, 2]", "log.gradients_at.1=7").log.gradients_at == [1, 7]


@pytest.mark.parametrize(
    "overrides, problem",
    [
        (
            ["data.sources=[{path: a}]", "data.sources.1.path=b"],
            "data.sources.1.path=b: data.sources has items 0 to 0, and no 1",
        ),
        (["data.sources=[{path: a}]", "data.sources.first.path=b"], "data.sources has items 0 to 0, and no first"),
        (["data.sources=[]", "data.sources.0.path=b"], "data.sources has no items, and no 0"),
        (["log.gradients_at=[1]", "log.gradients_at.²=2"], "log.gradients_at has items 0 to 0, and no ²"),
        (["run.steps=3", "run.steps.x=2"], "run.steps.x=2: run.steps is a single value and has no x"),
        (["log.gradients_at=[1]", "log.gradients_at.0.x.y=2"], "log.gradients_at.0 is a single value and has no x"),
        (["run.steps"], "'run.steps' is not of the form key=value, e.g. optim.lr=1e-3"),
        (["=3"], "'=3' is not of the form key=value"),
        (["run..steps=3"], "is not of the form key=value"),
        (["--run.steps=3"], "is not of the form key=value"),
        (["run.name=@x"], "run.name=@x: not valid YAML: found character '@' that cannot start any token"),
        (["run.name=a: b"], "run.name=a: b: not valid YAML: mapping values are not allowed here"),
        (["model={dim: 1, dim: 2}"], "model={dim: 1, dim: 2}: model.dim is written twice"),
        (["run.name=x\nrun: 1"], "is more than one value; give each key=value by itself"),
        (["run.name=exp #3"], "YAML takes what follows ' #' for a comment; quote the value"),
        (["run.name=#3"], "YAML takes what follows ' #' for a comment; quote the value"),
        (["run.name=it's #3"], "YAML takes what follows ' #' for a comment; quote the value"),
        (["run.name=a\x07b"], "not valid YAML: unacceptable character #x0007"),
    ],
)
def test_an_override_that_has_no_place_is_refused(overrides, problem):
    message = refused(None, *overrides)
    assert message.startswith("command line: ")
    assert problem in message.replace("\\n", "\n") or problem in message


def test_a_key_can_refer_to_another_key(write):
    path = write("run: {seed: 11, name: 'seed-${run.seed}'}\ndata: {seed: '${run.seed}'}\n")
    config, _ = load_config(path, ["optim.eps=${optim.weight_decay}", "optim.weight_decay=0.25", "run.seed=12"])
    assert (config.run.name, config.data.seed, config.optim.eps) == ("seed-12", 12, 0.25)


def test_a_list_can_refer_to_another_list(write):
    config, _ = load_config(write("data: {text: {input: [a, b]}}\nrun: {accept_changes: '${data.text.input}'}\n"))
    assert config.run.accept_changes == ["a", "b"]


@pytest.mark.parametrize(
    "overrides, problem",
    [
        (["optim.lr=${optim.rate}"], "command line: optim.lr: Interpolation key 'optim.rate' not found"),
        (["optim.lr=${optim.eps}", "optim.eps=${optim.lr}"], "command line: optim.lr: Recursive interpolation detected"),
        (["optim.lr=${"], "command line: optim.lr=${: ${ is not a reference to another key"),
        (["run.steps=${run.name}", "run.name=many"], "command line: run.steps: "),
        (["run.steps=${run.seed}"], "command line: run.steps=0: must be at least 1"),
        (["data.sources=[{path: '${nothing}'}]"], "command line: data.sources.0.path: Interpolation key 'nothing' not found"),
    ],
)
def test_a_reference_that_cannot_be_resolved_is_named_by_its_key(overrides, problem):
    assert refused(None, *overrides).startswith(problem)


@pytest.mark.parametrize(
    "value",
    ["${oc.env:HOME}", "${oc.env:HOME,x}", "${oc.decode:abc}", "${oc.select:run.seed}", "a${oc.env:HOME}b", "${run.${a}}"],
)
def test_a_reference_to_anything_but_a_key_is_refused(value):
    """T-D13: OmegaConf's resolvers read the environment, of which the record of a run would know nothing."""
    line = refused(None, f"run.name={value}")
    assert line.startswith("command line: run.name=") and "is not a reference to another key, such as ${run.seed}" in line
    assert "${oc" in line or "${run" in line
    assert "is not a reference" in refused(None, f"data.sources=[{{path: '{value}'}}]")


# ---- origins ----------------------------------------------------------------------------------------------------------


def test_the_origin_of_every_value_is_known(write, tmp_path):
    write("run:\n  seed: 3\nmodel: {dim: 8}\n", "base.yaml")
    path = write("include: base.yaml\nrun:\n  steps: 3\n\ndata:\n  sources:\n    - path: a\n")
    _, origins = load_config(path, ["model.layers=2", "optim={lr: 1e-3}"])
    expected = {
        "run.seed": f"{tmp_path / 'base.yaml'}:2",
        "model.dim": f"{tmp_path / 'base.yaml'}:3",
        "run.steps": f"{path}:3",
        "data.sources.0.path": f"{path}:7",
        "model.layers": "command line",
        "optim.lr": "command line",
        "model.heads": "default",
        "optim.eps": "default",
        "parallel.strategy": "default",
    }
    assert {name: origin_of(name, origins) for name in expected} == expected


def test_the_printed_configuration_shows_the_origins_and_loads_back(write, tmp_path):
    path = write("run: {steps: 3}\ndata: {sources: [{path: a}, {path: b, weight: 2}]}\n")
    config, origins = load_config(path, ["optim.lr=1e-3"])
    text = to_yaml(config, origins)
    lines = {line.split("#")[0].strip(): line.split("# ")[1] for line in text.splitlines() if "#" in line}
    assert lines["steps: 3"] == f"{path}:1"
    assert lines["lr: 0.001"] == "command line"
    assert lines["eps: 1.0e-08"] == "default"
    assert (lines["weight: 2.0"], lines["weight: null"]) == (f"{path}:2", "default")
    (tmp_path / "again.yaml").write_text(text)
    assert load_config(tmp_path / "again.yaml")[0] == config


def test_print_config_prints_the_derived_values_and_loads_back(write, tmp_path, capsys):
    path = write("run: {steps: 3}\nmodel: {dim: 32, heads: 4}\n")
    assert main(["--config", str(path), "--print-config", "run.seed=9"]) == 0
    (tmp_path / "printed.yaml").write_text(capsys.readouterr().out)
    config, _ = load_config(tmp_path / "printed.yaml")
    assert (config.run.name, config.run.steps, config.run.seed, config.data.seed) == ("run", 3, 9, 9)
    assert (config.model.head_dim, config.model.kv_heads, config.model.ffn_dim) == (8, 4, 128)
    assert main(["--config", str(tmp_path / "printed.yaml"), "--print-config", "--origins"]) == 0
    assert f"# {tmp_path / 'printed.yaml'}:" in capsys.readouterr().out


def test_a_refused_configuration_is_one_line_on_standard_error_and_exit_code_2(write, capsys):
    path = write("run: {stpes: 3}\n")
    assert main(["--config", str(path), "--print-config"]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err == f"error: {path}:1: unknown key run.stpes; the nearest valid name is run.steps\n"


# ---- what is printed loads back ---------------------------------------------------------------------------------------

texts = st.one_of(
    st.sampled_from(
        [*TRICKY, "null", "~", "true", "False", "", " ", "a: b", "# c", "-", "...", "---", "[]", "{}", "'", '"', "!x"]
    ),
    st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\0"), max_size=30),
    st.text("ab :#-\n\t\"'\\éß中😀\x85\u2028\ufeff\x7f", max_size=30),
).filter(lambda text: "${" not in text and text != "???" and not text.startswith("~/"))


def is_a_resume(text: str) -> bool:
    """Whether run.resume takes the text; `yes` and other tools' words are refused."""
    return not value_advice("run.resume", text)


numbers = st.floats(min_value=0, max_value=1000, exclude_min=True, allow_infinity=False, allow_nan=False)
configs = st.builds(
    Config,
    run=st.builds(Run, name=texts, dir=texts, resume=texts.filter(is_a_resume), seed=st.integers(0, 2**63 - 1), deterministic=st.booleans()),
    model=st.builds(Model, dim=st.integers(1, 2**24), kv_heads=st.none() | st.integers(1, 9), init_std=numbers),
    data=st.builds(
        Data,
        sources=st.lists(
            st.builds(Source, path=texts.filter(bool), name=st.none() | texts, weight=st.floats(0, 1e15)), max_size=3
        ),
        stages=st.lists(
            st.builds(
                MixtureStage,
                until_tokens=st.none() | st.integers(1, 2**62),
                weights=st.dictionaries(texts, st.floats(0, 1e15), max_size=2),
            ),
            max_size=2,
        ),
    ),
)


@settings(max_examples=10, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow])
@given(config=configs, with_origins=st.booleans())
@example(config=Config(run=Run(name="word " * 60, dir="a\n\nb")), with_origins=True)
@example(config=Config(run=Run(name="yes", dir="no", resume="on")), with_origins=False)
def test_any_printed_configuration_loads_back_equal(tmp_path, config, with_origins):
    path = tmp_path / "printed.yaml"
    path.write_text(to_yaml(config, {} if with_origins else None), encoding="utf-8", newline="")
    assert load_config(path)[0] == config


@pytest.mark.parametrize("space", ["", " ", "\t", "\x0b", " \n"])
def test_nothing_after_the_sign_is_null(space):
    assert loaded(f"model.kv_heads={space}") == loaded("model.kv_heads=null")


@settings(max_examples=10, deadline=None)
@given(texts)
@example("\xa0")
def test_any_text_can_be_given_on_the_command_line(text):
    assert loaded(f"run.name={dump(text, flow=True)}") == Config(run=dataclasses.replace(Run(), name=text))
