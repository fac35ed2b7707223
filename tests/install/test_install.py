"""`make install`: what it puts where, and that a program can be built against it and nothing else."""

import os
import re
import subprocess

import pytest

PROGRAM = r"""
#include <nibble.h>
#include <stdio.h>
int main(void)
{
    nb_engine_options options;
    nb_engine_options_default(&options);
    options.model_dir = "/nonexistent";
    nb_engine *engine = NULL;
    nb_error error;
    nb_status status = nb_engine_open(&engine, &options, &error);
    printf("%s %s: %s\n", nb_version(), nb_status_text(status), error.text);
    return engine != NULL;
}
"""


def run(*command, **more):
    return subprocess.run([str(c) for c in command], check=True, capture_output=True, text=True, **more).stdout


@pytest.fixture(scope="module")
def prefix(request, repo, tmp_path_factory):
    build = repo / request.config.getoption("--build")
    if not (build / "libnibble.so").exists():
        pytest.skip("sanitizer builds are not installed")
    prefix = tmp_path_factory.mktemp("prefix")
    run("cmake", "--install", build, "--prefix", prefix)
    return prefix


@pytest.mark.parametrize("compiler,suffix", [("gcc", ".c"), ("g++", ".cpp")])
def test_program_against_the_library(prefix, tmp_path, compiler, suffix):
    source, program = tmp_path / f"use{suffix}", tmp_path / "use"
    source.write_text(PROGRAM)
    [config] = prefix.glob("**/nibble.pc")
    env = {**os.environ, "PKG_CONFIG_PATH": str(config.parent)}
    flags = run("pkg-config", "--cflags", "--libs", "nibble", env=env).split()
    run(compiler, "-Wall", "-Wextra", "-Werror", source, *flags, "-o", program)
    env["LD_LIBRARY_PATH"] = str(config.parent.parent)
    said = run(program, env=env)
    assert re.match(r"\d+\.\d+\.\d+ not found: /nonexistent", said), said


def test_only_the_public_api_is_exported(prefix, repo):
    [library] = prefix.glob("**/libnibble.so")
    exported = set(re.findall(r"\b[A-Za-z] (\w+)", run("nm", "-D", "--defined-only", library)))
    header = re.sub(r"/\*.*?\*/", "", (repo / "include/nibble.h").read_text(), flags=re.S)
    declared = set(re.findall(r"^[a-z][\w *]*?\b(nb_\w+)\(", header, flags=re.M))
    assert len(declared) > 15
    assert exported == declared


def test_installed_program_finds_its_model(prefix):
    program = prefix / "bin" / "nibble"
    assert run(program, "--version").startswith("nibble ")
    if not (prefix / "share/nibble/models/glm5-tiny/config.json").exists():
        pytest.skip("no embedded model in this tree")
    assert "glm_moe_dsa" in run(program, "inspect")
