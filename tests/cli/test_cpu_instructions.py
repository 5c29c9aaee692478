import pytest

from kvferry.cli.cpu_instructions import instruction_set


@pytest.mark.parametrize(
    ("flags", "found", "remedy"),
    [
        ("fpu sse2", "no vector", "newer CPU"),
        ("fpu avx2", "avx2", "GGUF"),
        ("avx2 avx512f avx512_bf16", "avx512_bf16", ""),
    ],
)
def test_instruction_sets(flags, found, remedy):
    found_set = instruction_set(f"processor\t: 0\nmodel name\t: some avx2 amx_bf16 chip\nflags\t\t: {flags}\n")
    assert found in found_set[0]
    assert remedy in found_set[1]
    assert bool(found_set[1]) == bool(remedy)


def test_quantised_weights_need_no_bfloat16():
    assert instruction_set("flags\t\t: avx2\n", coded=True) == ("avx2", "")
    assert "newer CPU" in instruction_set("flags\t\t: sse2\n", coded=True)[1]


@pytest.mark.parametrize(("kernels", "slow"), [(None, False), ("amx", False), ("avx512_bf16", True)])
def test_tiles_that_the_kernels_do_not_use_are_a_warning(kernels, slow):
    found, remedy = instruction_set("flags\t\t: avx2 avx512_bf16 amx_tile amx_bf16\n", kernels)
    assert (kernels or "") in found
    assert ("Linux 5.16" in remedy) == slow


def test_arm_names_its_features():
    assert instruction_set("Features\t: fp asimd bf16 sve\n") == ("asimd bf16 sve", "")


def test_kernels_that_are_not_compiled_are_a_warning():
    found, remedy = instruction_set("flags\t\t: avx2 avx512_bf16\n", "")
    assert found.endswith("kernels: not compiled")
    assert "C++ compiler" in remedy
