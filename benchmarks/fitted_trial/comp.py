# ruff: noqa
"""compile trial variants -> trial.pkl: list of dict(name, op, cubin, entry, args, meta, threads, shared, cfg)"""

import sys, os, pickle, importlib, tempfile, re, subprocess, multiprocessing as mp

os.environ.update(MLIR_ENABLE_DUMP="0", TRITON_DISABLE_LINE_INFO="1", TRITON_ALWAYS_COMPILE="1")
SH = "NVMMASharedLayout(swizzle_byte_width={sw}, element_bitwidth=16, rank={rank}, transposed=False, fp4_padded=False, cga_layout=[])"


def desc(box, sw=128):
    return f"tensordesc<bf16[{','.join(map(str, box))}],{SH.format(rank=len(box), sw=sw)}>"


I32, I64 = "i32", "i64"


def rows_args(v, c):
    kn = c["W_KN"]
    BN, BK = c["BLOCK_N"], c["BLOCK_K"]
    a = [
        ("x", desc((c.get("XROWS", 64), BK), c.get("XSW", 128))) if not c["GATHER"] else ("x", "*bf16"),
        ("w", desc((1, BK, BN // c.get("WDIV", 1)) if kn else (1, BN // c.get("WDIV", 1), BK), c.get("WSW", 128))),
        ("y", "*bf16"),
    ]
    a += [] if c.get("NOMAP") or c["INDEXED"] and not c.get("YMAP") else [("y_map", desc((1, 1, 64, 64)))]
    a += [("m_sizes", "*i32"), ("index", "*i32"), ("row_weights", "*fp32"), ("bias", "*bf16"), ("counter", "*i32")]
    a += [(n, I32) for n in ("M", "N", "K", "E")] + [
        (n, I64) for n in ("stride_x_m", "stride_w_e", "stride_w_row", "stride_y_m")
    ]
    a += [(n, I32) for n in ("m_sizes_step", "index_step", "index_end", "x_divisor", "flags")]
    return a


def weight_args(v, c):
    BM, BK = c["BLOCK_M"], c["BLOCK_K"]
    a = [
        ("dy", desc((1, 1, BM, c.get("AW", 64)))),
        ("x", desc((1, 1, BM, BK // c.get("WDIV", 1)))),
        ("dw", desc((1, 64, 64))),
    ]
    a += [("m_sizes", "*i32"), ("counter", "*i32")] + ([("dy_at", "*bf16"), ("x_at", "*bf16")] if "AHEAD" in c else [])
    a += (
        [(n, I32) for n in ("M", "N", "K", "E")]
        + [(n, I64) for n in ("stride_dy_m", "stride_x_m", "stride_dw_e", "stride_dw_row")]
        + [("m_sizes_step", I32)]
    )
    return a


def div(args):
    d = {}
    for n, k in args:
        if n in ("x", "w", "y", "dy", "dw", "dy_at", "x_at") and k.startswith("*"):
            d[n] = 16
        elif n in ("N", "K") or k == I64:
            d[n] = 8
    return d


def one(job):
    name, mod, op, const = job
    if const.get("PLAIN"):
        return plain(job)
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.experimental.gluon._runtime import GluonASTSource

    m = importlib.import_module(mod)
    fn = m.weight_specialized if op == "dW" else m.rows_specialized
    args = weight_args(mod, const) if op == "dW" else rows_args(mod, const)
    with tempfile.TemporaryDirectory() as t:
        os.environ["TRITON_CACHE_DIR"] = t
        kinds = dict(args)
        extra = {k: v for k, v in const.items() if k in fn.arg_names} | (
            {"y_map": None} if const.get("INDEXED") and not const.get("YMAP") else {}
        )
        dv = div(args)
        src = GluonASTSource(
            fn,
            {n: kinds.get(n, "constexpr") for n in fn.arg_names},
            extra,
            {(list(fn.arg_names).index(n),): [["tt.divisibility", b]] for n, b in dv.items()},
        )
        warps = const.get("WARPS0", 4)
        try:
            from pretuned.aot.rewriting import rewriting

            with rewriting((leveled,) if const.get("LEVELED") else ()):
                k = triton.compile(src, target=GPUTarget("cuda", 90, 32), options={"num_warps": warps, "num_stages": 1})
        except Exception as e:
            while e.__cause__ is not None:
                e = e.__cause__
            return (
                name,
                None,
                str(e)[:700] if 1 else f"{type(e).__name__}: {str(e)[:1800]} CAUSE {str(e.__cause__)[:900]}",
            )
        if const.get("LEVELED"):
            cubin, hints = bytes(k.asm["cubin"]), 0
        elif const.get("CLUSTER") is not None:
            cubin, hints = pair(k, const)
        elif const.get("PARTS") == 3 or const.get("PINGPONG"):
            cubin, hints = cut(k, const.get("SHINT"))
        elif const.get("BOTH"):
            cubin, hints = both(k, const["BOTH"])
        elif const.get("STREAM"):
            cubin, hints = edited(k, const)
        else:
            cubin, hints = (
                (bytes(k.asm["cubin"]), 0)
                if "HINT" not in const and "SHINT" not in const
                else stored(k, const["SHINT"])
                if "SHINT" in const
                else hinted(k, const["HINT"], const.get("WHICH", "3d"))
            )
        open(t + "/a.cubin", "wb").write(cubin)
        tool = os.path.join(os.path.dirname(triton.__file__), "backends/nvidia/bin/cuobjdump")
        d = subprocess.run([tool, "--dump-resource-usage", t + "/a.cubin"], capture_output=True, text=True).stdout
        r = re.search(r"REG:(\d+) STACK:(\d+) SHARED:\d+ LOCAL:(\d+)", d)
        threads = int(re.search(r"^\.reqntid (\d+)", k.asm["ptx"], re.M)[1])
        return (
            name,
            dict(
                name=name,
                op=op,
                cubin=cubin,
                entry=k.metadata.name,
                args=[
                    (n, "desc" if kk.startswith("tensordesc") else "ptr" if kk.startswith("*") else kk)
                    for n, kk in args
                ],
                meta=[dict(m_) for m_ in (k.metadata.tensordesc_meta or ())],
                threads=threads,
                shared=k.metadata.shared,
                const=const,
                cluster=2 if const.get("CLUSTER") else 1,
            ),
            f"regs {r[1]} stack {r[2]} local {r[3]} shared {k.metadata.shared} threads {threads} hints {hints}",
        )


def pair(k, c):
    """cut for three parts, clustered for clusters"""
    import triton, clusters

    ptx = k.asm["ptx"]
    if c["PARTS"] == 3:

        def one(m):
            regs = [r.strip() for r in m[2].split(",")]
            assert len(regs) == 128, len(regs)
            return m[1].replace("n256", "n192") + "{" + ", ".join(regs[:96]) + "}"

        ptx, n = re.subn(r"(wgmma\.mma_async\.sync\.aligned\.m64n256k16[\w.]*\s*)\{([^}]*)\}", one, ptx)
        assert n and "m64n256" not in ptx, n
    if os.environ.get("PTX"):
        open(os.environ["PTX"], "w").write(ptx)
    if c["CLUSTER"]:
        ptx = clusters.clustered(ptx)
        if os.environ.get("PTX"):
            open(os.environ["PTX"] + "2", "w").write(ptx)
    with tempfile.TemporaryDirectory() as t:
        open(t + "/a.ptx", "w").write(ptx)
        r = subprocess.run(
            [
                os.path.join(os.path.dirname(triton.__file__), "backends/nvidia/bin/ptxas"),
                "-v",
                "--gpu-name=sm_90a",
                t + "/a.ptx",
                "-o",
                t + "/a.cubin",
            ],
            capture_output=True,
            text=True,
        )
        if r.returncode:
            raise RuntimeError(r.stderr[:900])
        return open(t + "/a.cubin", "rb").read(), [l for l in r.stderr.splitlines() if "wgmma" in l or "spill" in l]


POLICY = {"first": "0x12F0000000000000", "last": "0x14F0000000000000", "normal": "0x1000000000000000"}


def hinted(k, how, which="3d", cut=None):
    """(cubin) of the PTX with L2 hints on its TMA loads"""
    import triton

    ptx = k.asm["ptx"]
    pat = re.compile(r"(cp\.async\.bulk\.tensor\.%s\.shared::\w+\.global[\w.:]*)( \[[^;]*?\]);" % which)
    n = len(pat.findall(ptx))
    new = pat.sub(lambda m: f"{m[1]}.L2::cache_hint{m[2]}, {POLICY[how]};", ptx)
    with tempfile.TemporaryDirectory() as t:
        open(t + "/a.ptx", "w").write(new)
        r = subprocess.run(
            [
                os.path.join(os.path.dirname(triton.__file__), "backends/nvidia/bin/ptxas"),
                "--gpu-name=sm_90a",
                t + "/a.ptx",
                "-o",
                t + "/a.cubin",
            ],
            capture_output=True,
            text=True,
        )
        if r.returncode:
            raise RuntimeError(r.stderr[:500])
        return open(t + "/a.cubin", "rb").read(), n


def both(k, how):
    import triton

    ptx = k.asm["ptx"]
    if "L" in how:
        ptx = re.sub(
            r"(cp\.async\.bulk\.tensor\.4d\.shared::\w+\.global[\w.:]*)( \[[^;]*?\]);",
            lambda m: f"{m[1]}.L2::cache_hint{m[2]}, {POLICY['last']};",
            ptx,
        )
    if "F" in how:
        ptx = re.sub(
            r"(cp\.async\.bulk\.tensor\.\dd\.global\.shared::cta\.bulk_group)( \[[^;]*?\]);",
            lambda m: f"{m[1]}.L2::cache_hint{m[2]}, {POLICY['first']};",
            ptx,
        )
    with tempfile.TemporaryDirectory() as t:
        open(t + "/a.ptx", "w").write(ptx)
        r = subprocess.run(
            [
                os.path.join(os.path.dirname(triton.__file__), "backends/nvidia/bin/ptxas"),
                "--gpu-name=sm_90a",
                t + "/a.ptx",
                "-o",
                t + "/a.cubin",
            ],
            capture_output=True,
            text=True,
        )
        if r.returncode:
            raise RuntimeError(r.stderr[:500])
        return open(t + "/a.cubin", "rb").read(), ptx.count("cache_hint")


def cut(k, shint=None):
    """the PTX with n192 in place of n256"""
    import triton

    ptx = k.asm["ptx"]

    def one(m):
        regs = [r.strip() for r in m[2].split(",")]
        assert len(regs) == 128, len(regs)
        return m[1].replace("n256", "n192") + "{" + ", ".join(regs[:96]) + "}"

    new, n = re.subn(r"(wgmma\.mma_async\.sync\.aligned\.m64n256k16[\w.]*\s*)\{([^}]*)\}", one, ptx)
    assert n and "m64n256" not in new, n
    if shint:  # SHINT2
        new, q = re.subn(
            r"(cp\.async\.bulk\.tensor\.\dd\.global\.shared::cta\.bulk_group)( \[[^;]*?\]);",
            lambda m: f"{m[1]}.L2::cache_hint{m[2]}, {POLICY[shint]};",
            new,
        )
        assert q
    if os.environ.get("PTX"):
        open(os.environ["PTX"], "w").write(new)
    with tempfile.TemporaryDirectory() as t:
        open(t + "/a.ptx", "w").write(new)
        r = subprocess.run(
            [
                os.path.join(os.path.dirname(triton.__file__), "backends/nvidia/bin/ptxas"),
                "-v",
                "--gpu-name=sm_90a",
                t + "/a.ptx",
                "-o",
                t + "/a.cubin",
            ],
            capture_output=True,
            text=True,
        )
        if r.returncode:
            raise RuntimeError(r.stderr[:500])
        return open(t + "/a.cubin", "rb").read(), (
            n,
            [l for l in r.stderr.splitlines() if "wgmma" in l or "spill" in l],
        )


def leveled(ptx):
    import bisect

    marks = [(m.start(), int(m[1])) for m in re.finditer(r"// tokens (\d+)", ptx)]
    at = [p for p, _ in marks]

    def one(m):
        n = marks[bisect.bisect(at, m.start()) - 1][1]
        regs = [r.strip() for r in m[2].split(",")]
        written = int(re.search(r"n(\d+)k16", m[1])[1])
        assert len(regs) == written // 2, len(regs)
        return m[1].replace(f"n{written}k", f"n{n}k") + "{" + ", ".join(regs[: n // 2]) + "}"

    return re.sub(r"(wgmma\.mma_async\.sync\.aligned\.m64n\d+k16[\w.]*\s*)\{([^}]*)\}", one, ptx)


def levels(k, shint=None):
    import triton, bisect

    ptx = k.asm["ptx"]
    marks = [(m.start(), int(m[1])) for m in re.finditer(r"// tokens (\d+)", ptx)]
    at = [p for p, _ in marks]
    seen = {}

    def one(m):
        n = marks[bisect.bisect(at, m.start()) - 1][1]
        regs = [r.strip() for r in m[2].split(",")]
        written = int(re.search(r"n(\d+)k16", m[1])[1])
        assert len(regs) == written // 2, len(regs)
        seen[n] = seen.get(n, 0) + 1
        return m[1].replace(f"n{written}k", f"n{n}k") + "{" + ", ".join(regs[: n // 2]) + "}"

    new = re.sub(r"(wgmma\.mma_async\.sync\.aligned\.m64n\d+k16[\w.]*\s*)\{([^}]*)\}", one, ptx)
    if os.environ.get("PTX"):
        open(os.environ["PTX"], "w").write(new)
    with tempfile.TemporaryDirectory() as t:
        open(t + "/a.ptx", "w").write(new)
        r = subprocess.run(
            [
                os.path.join(os.path.dirname(triton.__file__), "backends/nvidia/bin/ptxas"),
                "-v",
                "--gpu-name=sm_90a",
                t + "/a.ptx",
                "-o",
                t + "/a.cubin",
            ],
            capture_output=True,
            text=True,
        )
        if r.returncode:
            raise RuntimeError(r.stderr[:500])
        return open(t + "/a.cubin", "rb").read(), (
            seen,
            [l for l in r.stderr.splitlines() if "wgmma" in l or "spill" in l],
        )


def edited(k, c):
    """PTX with L2 hints on w's loads (STREAM) and prefetched tensor maps (PREF)"""
    import triton

    ptx = k.asm["ptx"]
    if c.get("STREAM"):
        pat = re.compile(r"(cp\.async\.bulk\.tensor\.3d\.shared::\w+\.global[\w.:]*)( \[[^;]*?\]);")
        ptx = pat.sub(lambda m: f"{m[1]}.L2::cache_hint{m[2]}, {POLICY['first']};", ptx)
    if c.get("PREF"):
        maps = re.findall(r"\.param \.align 64 \.b8 (\w+)\[128\]", ptx)
        body = ptx.index("{", ptx.index(".entry"))
        # after the last .reg declaration
        at = re.compile(r"\{\n(\s*\.(reg|loc|shared)[^\n]*\n)+").search(ptx, body).end()
        text = (
            "\t.reg .pred %pfp; .reg .b32 %pft; .reg .b64 %pfa;\n\tmov.u32 %pft, %tid.x; setp.eq.u32 %pfp, %pft, 0;\n"
        )
        for m in maps:
            text += f"\tmov.b64 %pfa, {m}; cvta.param.u64 %pfa, %pfa; @%pfp prefetch.tensormap [%pfa];\n"
        ptx = ptx[:at] + text + ptx[at:]
    with tempfile.TemporaryDirectory() as t:
        open(t + "/a.ptx", "w").write(ptx)
        r = subprocess.run(
            [
                os.path.join(os.path.dirname(triton.__file__), "backends/nvidia/bin/ptxas"),
                "--gpu-name=sm_90a",
                t + "/a.ptx",
                "-o",
                t + "/a.cubin",
            ],
            capture_output=True,
            text=True,
        )
        if r.returncode:
            raise RuntimeError(r.stderr[:500])
        return open(t + "/a.cubin", "rb").read(), len(ptx)


def stored(k, how):
    import triton

    ptx = k.asm["ptx"]
    pat = re.compile(r"(cp\.async\.bulk\.tensor\.\dd\.global\.shared::cta\.bulk_group)( \[[^;]*?\]);")
    n = len(pat.findall(ptx))
    assert n, [l for l in ptx.splitlines() if "bulk" in l][:3]
    new = pat.sub(lambda m: f"{m[1]}.L2::cache_hint{m[2]}, {POLICY[how]};", ptx)
    with tempfile.TemporaryDirectory() as t:
        open(t + "/a.ptx", "w").write(new)
        r = subprocess.run(
            [
                os.path.join(os.path.dirname(triton.__file__), "backends/nvidia/bin/ptxas"),
                "--gpu-name=sm_90a",
                t + "/a.ptx",
                "-o",
                t + "/a.cubin",
            ],
            capture_output=True,
            text=True,
        )
        if r.returncode:
            raise RuntimeError(r.stderr[:500])
        return open(t + "/a.cubin", "rb").read(), n


def plain(job):
    name, mod, op, c = job
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    fn = importlib.import_module(mod).weight if op == "dW" else importlib.import_module(mod).rows
    BM, BN, BK = c["BLOCK_M"], c["BLOCK_N"], c["BLOCK_K"]
    EL = c.get("EL", "bf16")
    d = lambda b: f"tensordesc<{EL}[{','.join(map(str, b))}]>"
    args = (
        []
        if op == "dW"
        else [
            ("x", d((BM, BK)) if c["X_TMA"] else "*bf16"),
            ("w", d((1, BK, BN) if c["W_KN"] else (1, BN, BK)) if c["W_TMA"] else "*bf16"),
            ("y", "*" + EL),
            ("m_sizes", "*i32"),
            ("index", "*i32"),
            ("row_weights", "*fp32"),
            ("bias", "*" + EL),
        ]
    )
    args += [(n, I32) for n in ("M", "N", "K", "E")] + [
        (n, I64) for n in ("stride_x_m", "stride_w_e", "stride_w_row", "stride_y_m")
    ]
    args += [(n, I32) for n in ("m_sizes_step", "index_step", "index_end", "x_divisor", "flags")]
    if op == "dW":
        args = [("dy", d((1, 1, BM, BN))), ("x", d((1, 1, BM, BK))), ("dw", "*" + EL), ("m_sizes", "*i32")]
        args += (
            [(n, I32) for n in ("M", "N", "K", "E")]
            + [(n, I64) for n in ("stride_dy_m", "stride_x_m", "stride_dw_e", "stride_dw_row")]
            + [("m_sizes_step", I32)]
        )
    with tempfile.TemporaryDirectory() as t:
        os.environ["TRITON_CACHE_DIR"] = t
        kinds = dict(args)
        dv = div(args)
        src = ASTSource(
            fn,
            {n: kinds.get(n, "constexpr") for n in fn.arg_names},
            {k: v for k, v in c.items() if k in fn.arg_names},
            {(list(fn.arg_names).index(n),): [["tt.divisibility", b]] for n, b in dv.items()},
        )
        try:
            k = triton.compile(
                src, target=GPUTarget("cuda", 90, 32), options={"num_warps": c["WARPS"], "num_stages": c["STAGES_"]}
            )
        except Exception as e:
            return name, None, str(e)[:1800] + " CAUSE " + str(e.__cause__)[:600]
        threads = int(re.search(r"^\.reqntid (\d+)", k.asm["ptx"], re.M)[1])
        cubin, hints = edited(k, c)
        return (
            name,
            dict(
                name=name,
                op=op,
                cubin=cubin,
                entry=k.metadata.name,
                args=[
                    (n, "desc" if kk.startswith("tensordesc") else "ptr" if kk.startswith("*") else kk)
                    for n, kk in args
                ],
                meta=[dict(m_) for m_ in (k.metadata.tensordesc_meta or ())],
                threads=threads,
                shared=k.metadata.shared,
                const=c | {"BLOCK_ROWS": BM},
            ),
            f"shared {k.metadata.shared} hints {hints}",
        )


def main():
    jobs = importlib.import_module(sys.argv[1]).JOBS
    out = []
    with mp.get_context("spawn").Pool(2, maxtasksperchild=4) as p:
        for name, v, msg in p.imap(one, jobs):
            print(name, "|", msg, flush=True)
            if v:
                out.append(v)
    pickle.dump(out, open(sys.argv[2], "wb"))


if __name__ == "__main__":
    main()
