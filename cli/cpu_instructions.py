"""Reports the CPU's vector instructions and which of them the kernels use (`kvferry doctor`)."""

from __future__ import annotations

VECTORS = ("avx2", "avx512f", "avx512_bf16", "avx512_vnni", "avx_vnni", "amx_bf16", "asimd", "bf16", "sve")


def compiled_for() -> str | None:
    """Return the instruction set that the CPU kernels use; empty if they are not compiled, None without torch."""
    try:
        from kvferry.kernels.cpu import instruction_set as used
    except ImportError:
        return None
    return used() or ""


def instruction_set(cpuinfo: str, kernels: str | None = None, *, coded: bool = False) -> tuple[str, str]:
    """Return the instruction sets in /proc/cpuinfo's text (`flags`, Arm: `Features`), and a remedy if they are slow.

    kernels: the instruction set that the kernels use, empty if they are not compiled. coded: the weights are quantised,
    so bfloat16 hardly matters."""
    lines = (line.partition(":") for line in cpuinfo.splitlines())
    flags = {word for key, _, words in lines if key.strip() in ("flags", "Features") for word in words.split()}
    found = " ".join(name for name in VECTORS if name in flags) or "no vector instructions"
    found += f"; kernels: {kernels or 'not compiled'}" if kernels is not None else ""
    if kernels == "":
        return found, "install with a C++ compiler; KVFERRY_KERNELS_REQUIRED=1 at installation shows why kernels fail"
    if "amx_bf16" in flags and kernels not in (None, "amx"):
        return (
            found,
            "Linux 5.16 or later, no seccomp filter of arch_prctl, and a compiler with AMX support are needed "
            "for tiles",
        )
    if not {"avx2", "asimd"} & flags:
        return found, "use a newer CPU or a GPU; this one is very slow"
    if not (coded or {"avx512_bf16", "amx_bf16", "bf16"} & flags):
        return f"{found}; no bfloat16", "try a quantized GGUF, which is faster here"
    return found, ""
