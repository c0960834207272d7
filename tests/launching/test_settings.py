"""What tools/launch.py is told with --set: its types, what it needs, and the one line for what it cannot take."""

from __future__ import annotations

import json
import re
import shlex
from pathlib import Path

import pytest
import yaml
from running import tool

from pretrain.config.read import read_file
from pretrain.errors import LaunchError
from pretrain.launching.targets import Launch, Target, parse_settings, read_target, setting_types, target_names, typed

ROOT = Path(__file__).resolve().parents[2]
CONFIG = str(ROOT / "configs" / "pretrain" / "llama-125m.yaml")
POD = {"image": "r/p:1", "volume_claim": "runs"}
JOB = {"image": "i", "role": "arn:aws:iam::123456789012:role/t", "instance_type": "ml.p5.48xlarge", "bucket": "s3://b/runs"}
SHARED = {"file_system": "fs-0123456789abcdef0", "file_system_path": "/fsx", "subnets": "s-1,s-2", "security_groups": "[sg-1]"}


def launch_words(target: str, settings: dict[str, str], *words: str) -> list[str]:
    return ["--config", CONFIG, "--target", target, *(f"--set={name}={value}" for name, value in settings.items()), *words]


def planned(capsys, target: str, settings: dict[str, str], *words: str) -> str:
    """What --dry-run prints."""
    code = tool("launch").main([*launch_words(target, settings, *words), "--dry-run"])
    printed = capsys.readouterr()
    assert (code, printed.err) == (0, "")
    return printed.out


def request(capsys, settings: dict[str, str], *words: str) -> dict:
    """The request to SageMaker."""
    text = planned(capsys, "sagemaker", {**JOB, **settings}, *words)
    return json.loads(text[text.index("{") : text.rindex("}") + 1])


def manifest(capsys, target: str, settings: dict[str, str], *words: str) -> list[dict]:
    lines = planned(capsys, target, settings, *words).splitlines()
    return list(yaml.safe_load_all("\n".join(lines[1:-1])))


def refused(capsys, words: list[str]) -> str:
    code = tool("launch").main(words)
    said = capsys.readouterr().err
    assert code == 2 and said.startswith("error: ") and said.count("\n") == 1, said
    return said


# ---- types ------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("target", "settings", "says"),
    [
        ("slurm", {"partition.x": "7"}, "--set partition: slurm takes a str, got a mapping"),
        ("slurm", {"partition": "[a,b]"}, "--set partition: slurm takes a str, got a list; quote a str with brackets"),
        ("local", {"restarts": "many"}, "--set restarts: local takes an int of 0 or above, got many"),
        ("local", {"restarts": "-1"}, "--set restarts: local takes an int of 0 or above, got -1"),
        ("local", {"restarts": "1.5"}, "--set restarts: local takes an int of 0 or above, got 1.5"),
        ("local", {"restarts": ""}, "--set restarts: local needs an int of 0 or above, and got nothing"),
        ("sagemaker", {**JOB, "spot": "yes"}, "--set spot: sagemaker takes a bool: true or false, got yes"),
        ("sagemaker", {**JOB, "wait_seconds": "long"}, "--set wait_seconds: sagemaker takes an int of 0 or above, got long"),
        ("ssh", {"hosts": "null"}, "--set hosts: ssh needs a list[str]: a,b, and got nothing"),
        ("ssh", {"hosts": "[]"}, "--set hosts: ssh needs a list[str]: a,b, and got nothing"),
        ("ssh", {"hosts": "node-a,"}, "--set hosts: ssh got an empty item in 'node-a,'; remove it"),
        ("ssh", {"hosts": "node-a,,node-b"}, "--set hosts: ssh got an empty item"),
        ("ssh", {"hosts": "node-a, node-a"}, "--set hosts: ssh got node-a twice; name each once"),
        ("ssh", {"hosts": "{a: b}"}, "--set hosts: ssh takes a list[str]: a,b, got a mapping"),
        ("ssh", {"hosts": "a", "ssh": "null"}, "--set ssh: ssh needs a str, and got nothing"),
        ("ssh", {"hosts": "a", "ssh": ""}, "--set ssh: ssh needs a str, and got nothing"),
        ("ssh", {"hosts": "a", "ssh": "ssh -o 'x"}, "--set ssh=ssh -o 'x: No closing quotation; write it as in a shell"),
        ("ssh", {"hosts": "a", "port": "65536"}, "--set port=65536: there are ports 1 to 65535"),
        ("sagemaker", {**JOB, "seconds": "0"}, "--set seconds=0: sagemaker takes a number above 0"),
        ("sagemaker", {**JOB, "volume_gb": "0"}, "--set volume_gb=0: sagemaker takes a number above 0"),
        ("sagemaker", {**JOB, "bucket": "s3://b/p/"}, "--set bucket=s3://b/p/: sagemaker takes an address that begins with s3://"),
        ("sagemaker", {**JOB, "bucket": "b"}, "--set bucket=b: sagemaker takes an address that begins with s3://"),
        ("skypilot", {"volume": "v", "accelerator": "H100:4"}, "--set accelerator=H100:4: skypilot takes a name without a number"),
    ],
)
def test_a_setting_of_another_type_is_refused_in_one_line(capsys, target, settings, says):
    assert says in refused(capsys, [*launch_words(target, settings), "--dry-run"])


@pytest.mark.parametrize("text", ["5", "10.5", "0123", "1e3", "0x1f", "true", "1_000", "y", "[rack1|rack2]"])
def test_a_text_is_what_was_typed(capsys, text):
    typed_in = f"'{text}'" if text.startswith("[") else text
    assert f"--account={text}" in shlex.split(planned(capsys, "slurm", {"account": typed_in}))
    pod = {**POD, "service_account": typed_in, "volume_claim": typed_in}
    printed = planned(capsys, "kubernetes", pod).splitlines()
    [_, job] = yaml.safe_load_all("\n".join(printed[1:-1]))
    spec = job["spec"]["template"]["spec"]
    assert spec["serviceAccountName"] == spec["volumes"][0]["persistentVolumeClaim"]["claimName"] == text
    # Readers of YAML 1.2, and of all of YAML 1.1, know more numbers and words than PyYAML.
    if not text.startswith("["):
        [line] = [line for line in printed if "serviceAccountName" in line]
        assert line.split(": ")[1] == f"'{text}'"


def test_hosts_are_names_even_if_they_are_numbers(capsys):
    lines = planned(capsys, "ssh", {"hosts": "5, 10.5", "folder": "7", "ssh": "s"}, "--nodes", "2").splitlines()
    assert [shlex.split(line)[:2] for line in lines] == [["s", "5"], ["s", "10.5"]]
    assert all("cd 7 && " in shlex.split(line)[2] and "HEAD=5:29500" in shlex.split(line)[2] for line in lines)
    again = planned(capsys, "ssh", {"hosts": "[5, 10.5]", "folder": "7", "ssh": "s"}, "--nodes", "2")
    assert again.splitlines() == lines
    assert " && . " in lines[0] and " && . " not in planned(capsys, "ssh", {"hosts": "a", "activate": "null"})


def test_every_setting_of_every_target_has_a_type_that_its_default_fits():
    for name in target_names():
        target = read_target(name)
        types = setting_types(target.settings, target.types, name)
        for setting, default in target.settings.items():
            assert default == "???" or typed(setting, default, types[setting], name) == default
        assert {*target.types, *target.at_least, *target.forms} | {each for needed in target.needs.values() for each in needed} <= types.keys()


def test_a_target_with_a_type_that_there_is_not_is_refused():
    with pytest.raises(LaunchError, match=r"x.yaml: a has the type float; there are str, int, bool, list\[str\]"):
        Target("x", "", {"a": 1.5}).chosen(Launch(CONFIG, 1, 1), {})
    with pytest.raises(LaunchError, match="x.yaml: types names b, which is no setting; there are a"):
        Target("x", "", {"a": 1}, types={"b": "int"}).chosen(Launch(CONFIG, 1, 1), {})


def test_values_of_the_command_line_stay_the_text_that_was_typed(tmp_path):
    given = {"a": "007", "b": "1e-4", "c": "null", "d": "[1, x, {e: 2.50}]", "f": "a b"}
    assert parse_settings([f"{name}={text}" for name, text in given.items()]) == {
        **given, "c": None, "d": ["1", "x", {"e": "2.50"}],
    }  # fmt: skip
    (tmp_path / "f.yaml").write_text("a: 1e-4")
    assert read_file(tmp_path / "f.yaml").values == {"a": 1e-4}


# ---- manifests ----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("target", ["slurm", "ssh", "local"])
def test_output_is_for_targets_with_a_manifest(capsys, tmp_path, target):
    settings = {"hosts": "a"} if target == "ssh" else {}
    said = refused(capsys, launch_words(target, settings, "--dry-run", "--output", str(tmp_path / "x.yaml")))
    assert f"{target} is started by a command and has no manifest; leave it out" in said


def test_a_manifest_that_cannot_be_written_is_one_line(capsys, tmp_path):
    (tmp_path / "file").touch()
    for place in (tmp_path / "file" / "x.yaml", Path("/proc/nope/x.yaml")):
        said = refused(capsys, launch_words("kubernetes", POD, "--output", str(place)))
        assert said.startswith("error: the manifest cannot be kept: /") and "name another file: --output FILE" in said


def test_an_ssh_that_is_not_installed_is_one_line(capsys):
    said = refused(capsys, launch_words("ssh", {"hosts": "a", "ssh": "no-such-ssh -v"}))
    assert "there is no program no-such-ssh here" in said


@pytest.mark.parametrize(
    ("target", "settings", "words", "unused"),
    [
        ("skypilot", {"volume": "disk", "accelerator": "H100"}, ["--cpu"], "accelerator"),
        ("kubernetes", {**POD, "device": "amd.com/gpu"}, ["--cpu"], "device"),
        ("kubernetes", {**POD, "data_mount": "/mnt"}, [], "data_mount"),
    ],
)
def test_a_setting_that_this_launch_has_no_use_for_is_refused(capsys, target, settings, words, unused):
    assert f"--set {unused}: {target} has no use for it" in refused(capsys, [*launch_words(target, settings, *words), "--dry-run"])
    del settings[unused]
    assert tool("launch").main([*launch_words(target, settings, *words), "--dry-run"]) == 0


def test_an_accelerator_is_needed_by_processes_that_have_devices(capsys):
    said = refused(capsys, launch_words("skypilot", {"volume": "disk"}, "--dry-run"))
    assert "skypilot with devices needs --set accelerator=..." in said
    [task] = manifest(capsys, "skypilot", {"volume": "disk"}, "--cpu", "--gpus", "2")
    assert "accelerators" not in task["resources"] and " GPUS=2 " in task["run"]
    [task] = manifest(capsys, "skypilot", {"volume": "disk", "accelerator": "H100"}, "--gpus", "8")
    assert task["resources"]["accelerators"] == "H100:8" and " GPUS=8 " in task["run"]


# ---- Kubernetes ---------------------------------------------------------------------------------------------------------------


def as_kubernetes_expands(text: str, variables: dict[str, str]) -> str:
    """Kubernetes' rule for `command` and `args`: Expand in third_party/forked/golang/expansion/expand.go."""
    found, at = "", 0
    while at < len(text):
        rest = text[at + 1 :]
        if text[at] != "$" or not rest:
            found, at = found + text[at], at + 1
        elif rest[0] == "$":
            found, at = found + "$", at + 2
        elif rest[0] == "(" and ")" in rest:
            name = rest[1 : rest.index(")")]
            found, at = found + variables.get(name, f"$({name})"), at + len(name) + 3
        else:
            found, at = found + "$" + rest[0], at + 2
    return found


def test_the_rule_of_kubernetes_as_its_own_tests_have_it():
    """Cases of expansion_test.go and of the documentation of `args`."""
    variables = {"VAR_A": "A", "VAR_B": "B", "VAR_REF": "$(VAR_A)"}
    cases = {
        "$(VAR_A)": "A", "___$(VAR_B)___": "___B___", "$(VAR_A)_$(VAR_B)": "A_B", "$$(VAR_B)_$(VAR_A)": "$(VAR_B)_A", "$$$$": "$$",
        "f000-$$VAR_A": "f000-$VAR_A", "foo\\$(VAR_A)bar": "foo\\Abar", "$(VAR_REF)": "$(VAR_A)", "$?_boo_$!": "$?_boo_$!",
        "$VAR_A": "$VAR_A", "$(VAR_DNE)": "$(VAR_DNE)", "$$$(VAR_A)": "$A", "$": "$", "foo$(": "foo$(", "$((VAR_A)": "$((VAR_A)",
    }  # fmt: skip
    assert {text: as_kubernetes_expands(text, variables) for text in cases} == cases


@pytest.mark.parametrize("target", ["kubernetes", "kubernetes-jobset", "kubernetes-trainjob"])
def test_words_reach_a_pod_as_they_are(capsys, target):
    words = ["run.name='a$(NODES)$'", 'validation.prompts=["cost $$ $(HEAD)", "$HOME $$$(GPUS) $( $"]']
    document = manifest(capsys, target, POD, *words)[-1]

    def found(value):
        if isinstance(value, dict):
            yield from ([value] if "args" in value else [])
            value = list(value.values())
        for item in value if isinstance(value, list) else []:
            yield from found(item)

    [container] = found(document)
    variables = {one["name"]: one.get("value", "0") for one in container["env"]} | {"HEAD": "head", "NODES": "1", "GPUS": "1"}
    expanded = [as_kubernetes_expands(word, variables) for word in container["args"]]
    assert expanded == ["--config", CONFIG, *words]
    assert [as_kubernetes_expands(word, variables) for word in container["command"]] == container["command"]


# ---- SageMaker ----------------------------------------------------------------------------------------------------------------


def needs(text: str) -> set[str]:
    return set(re.findall(r"--set (\w+)=\.\.\.", text))


@pytest.mark.parametrize(
    ("settings", "words", "needed"),
    [
        ({"file_system": "fs-1", "subnets": "[s-1]"}, ["--nodes", "2"], {"file_system_path", "security_groups"}),
        ({"file_system": "fs-1"}, [], {"file_system_path", "subnets", "security_groups"}),
        ({"file_system_path": "/fsx"}, [], {"file_system"}),
        ({"subnets": "s-1"}, [], {"security_groups"}),
        ({"security_groups": "sg-1"}, [], {"subnets"}),
        ({"spot": "true"}, [], {"wait_seconds"}),
        ({"wait_seconds": "100000"}, [], {"spot"}),
    ],
)
def test_what_sagemaker_takes_only_together_is_asked_for_together(capsys, settings, words, needed):
    assert needs(refused(capsys, [*launch_words("sagemaker", {**JOB, **settings}, *words), "--dry-run"])) == needed


def test_a_spot_job_waits_at_least_as_long_as_it_may_train(capsys):
    spot = {"spot": "true", "seconds": "1000", "wait_seconds": "999"}
    said = refused(capsys, [*launch_words("sagemaker", {**JOB, **spot}), "--dry-run"])
    assert "--set wait_seconds=999: sagemaker needs at least seconds, which is 1000; raise it" in said
    stopping = request(capsys, {**spot, "wait_seconds": "1000"})["StoppingCondition"]
    assert stopping == {"MaxRuntimeInSeconds": 1000, "MaxWaitTimeInSeconds": 1000}


def test_requests_with_shared_storage_fit_the_model_of_the_api(capsys):
    import botocore.session
    from botocore.validate import ParamValidator

    service = botocore.session.get_session().get_service_model("sagemaker")
    shape = service.operation_model("CreateTrainingJob").input_shape
    made = request(capsys, SHARED, "--nodes", "2")
    assert ParamValidator().validate(made, shape).generate_report() == ""
    assert made["VpcConfig"] == {"Subnets": ["s-1", "s-2"], "SecurityGroupIds": ["sg-1"]}


def test_a_second_job_of_a_run_has_another_name_and_the_same_checkpoints(capsys):
    first = request(capsys, {})
    second = request(capsys, {"job_name": "llama-125m-2"})
    assert (first["TrainingJobName"], second["TrainingJobName"]) == ("llama-125m", "llama-125m-2")
    assert first["CheckpointConfig"]["S3Uri"] == "s3://b/runs/llama-125m/checkpoints"
    assert {**second, "TrainingJobName": "llama-125m"} == first
