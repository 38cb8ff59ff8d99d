# ruff: noqa
import sys, json, pickle, ctypes as C, statistics, time, struct
import torch

sys.path.insert(0, sys.argv[4] if len(sys.argv) > 4 else ".")
import method

cu = C.CDLL("libcuda.so.1")
torch.zeros(1, device="cuda")


def ck(r, w):
    if r:
        raise RuntimeError(f"{w}: {r}")


SM = torch.cuda.get_device_properties(0).multi_processor_count
MODELS = {
    "qwen3-30b": (128, 2048, 768, 8),
    "qwen3-next": (512, 2048, 512, 10),
    "deepseek-v3": (256, 7168, 2048, 8),
    "mixtral-8x7b": (8, 4096, 14336, 2),
    "gpt-oss-20b": (32, 2880, 2880, 4),
    "olmoe": (64, 2048, 1024, 8),
    "granite": (32, 512, 512, 8),
    "granite2": (32, 1024, 512, 8),
}
import os

variants = [v for v in pickle.load(open(sys.argv[1], "rb")) if os.environ.get("ONLY") in (None, v["name"])]
plan = json.loads(sys.argv[2])
DT = getattr(torch, plan.get("dtype", "bfloat16"))
F32 = DT is torch.float32
torch.backends.cuda.matmul.allow_tf32 = True
#  # {"models": [...], "cells": [["forward", 8192], ...]}
for v in variants:
    mod, fn = C.c_void_p(), C.c_void_p()
    ck(cu.cuModuleLoadData(C.byref(mod), v["cubin"]), "load " + v["name"])
    ck(cu.cuModuleGetFunction(C.byref(fn), mod, v["entry"].encode()), "fn")
    if v["shared"] > 48 << 10:
        ck(cu.cuFuncSetAttribute(fn, 8, v["shared"]), "attr")
    n = C.c_int()
    ck(cu.cuOccupancyMaxActiveBlocksPerMultiprocessor(C.byref(n), fn, v["threads"], C.c_size_t(v["shared"])), "occ")
    v["fn"], v["per_sm"] = fn, n.value
keep = []


def tmap(meta, ptr, sizes, strides, promo=2):  # outermost first, elements
    rank = len(sizes)
    buf = C.create_string_buffer(192)
    at = C.addressof(buf) + (-C.addressof(buf) % 64)
    box = meta["block_size"]
    ck(
        cu.cuTensorMapEncodeTiled(
            C.c_void_p(at),
            11 if F32 else 9,
            rank,
            C.c_void_p(ptr),
            struct.pack(f"={rank}Q", *reversed(sizes)),
            struct.pack(f"={rank - 1}Q", *(s * (4 if F32 else 2) for s in reversed(strides))),
            struct.pack(f"={rank}I", *reversed(box)),
            struct.pack(f"={rank}I", *[1] * rank),
            0,
            meta["swizzle"],
            promo,
            0,
        ),
        "tmap",
    )
    keep.append(buf)
    return at


TABLES = {}
if os.environ.get("SIDE") and os.path.exists("/tmp/side.json"):
    import random

    side = json.load(open("/tmp/side.json"))["side"]

    def table(order, sides):
        t = [0] * 1024
        for r, s_ in enumerate(order):
            t[s_] = r
        n = [0, 0]
        for s_ in order:
            t[256 + s_] = sides[s_]
            t[512 + s_] = n[sides[s_]]
            n[sides[s_]] += 1
        t[768:770] = n
        return torch.tensor(t, dtype=torch.int32, device="cuda")

    order = list(range(SM))
    TABLES["id"] = table(order, side)
    TABLES["smid"] = TABLES["id"]
    random.seed(1)
    mixed = random.sample(order, SM)
    rs = [0] * SM
    for i, s_ in enumerate(mixed):
        rs[s_] = i % 2 if i < 2 * min(sum(side), SM - sum(side)) else int(sum(side) > SM // 2)
    TABLES["rand"] = table(mixed, rs)
    pr = list(range(SM // 2))
    random.shuffle(pr)
    TABLES["pairs"] = table([2 * p_ + i_ for p_ in pr for i_ in (0, 1)], side)
    # which GPC: rows of up to 8 TPCs, the side vector says who ran out; approximated by latency correlation
    lat = torch.tensor(json.load(open("/tmp/side.json"))["lat"], dtype=torch.float32)
    z = lat - lat.mean(0, keepdim=True)
    z = z - z.mean(1, keepdim=True)
    z = z / z.norm(dim=1, keepdim=True)
    cor = z @ z.T
    left, gpcs = list(range(SM)), []
    while left:
        s0 = left[0]
        near = sorted(left, key=lambda s_: -cor[s0, s_].item())[: 16 if len(left) > 18 else len(left)]
        gpcs.append(sorted(near))
        left = [s_ for s_ in left if s_ not in near]
    print("gpcs", gpcs)
    TABLES["gpc"] = table([s_ for g_ in gpcs for s_ in g_], side)
    ev, od = order[0::2], order[1::2]
    # neighbours in number on different TPCs of the same side
    sd = [[p_ for p_ in range(SM // 2) if side[2 * p_] == q] for q in (0, 1)]
    brk = []
    for q in (0, 1):
        t_ = sd[q]
        brk += [2 * t_[i_] for i_ in range(len(t_))]
        brk += [2 * t_[i_] + 1 for i_ in range(len(t_))]
    TABLES["broken"] = table(brk, side)
    TABLES["side"] = table(sorted(order, key=lambda s_: (side[s_], s_)), side)
RAG = (0x7FFF0000, 0x7FFF0000, 1 << 30)


def rag(s):
    return ((1 << 34) - s, s, s)


counter = torch.zeros(1024, dtype=torch.int32, device="cuda")


def caller(v, op, x, w, dy, out, m_sizes, E, N, K):
    """launch closure; forward: y=x w^T ; dX: dx = dy w ; dW"""
    c = v["const"]
    metas = list(v["meta"])
    vals = {}
    M = x.shape[0]
    if op == "dW":
        cols, red = N, K
        vals.update(
            dy=(dy.data_ptr(), (*RAG, N), rag(N)),
            x=(x.data_ptr(), (*RAG, K), rag(K)),
            dw=(out.data_ptr(), (E, N, K), (N * K, K)),
            y_map=(out.data_ptr(), (E, N, K), (N * K, K)),
            stride_dy_m=N,
            stride_x_m=K,
            stride_dw_e=N * K,
            stride_dw_row=K,
            N=N,
            K=K,
        )
        tiles = E * -(-N // (c["BLOCK_N"] if c.get("PLAIN") else c.get("BLOCK_ROWS", 128))) * -(-K // c["BLOCK_K"])
        if c.get("PLAIN") and dict(v["args"])["dw"] != "desc":
            vals["dw"] = out.data_ptr()
    else:
        a, cols, red = (x, N, K) if op == "forward" else (dy, K, N)
        if c.get("GATHER"):
            a = TOK if op == "forward" else DTOK
        vals.update(
            x=(a.data_ptr(), (M, red), (red,)),
            w=(w.data_ptr(), (E, N, K), (N * K, K)),
            y=out.data_ptr(),
            y_map=(out.data_ptr(), (*RAG, cols), rag(cols)),
            stride_x_m=red,
            stride_w_e=N * K,
            stride_w_row=K,
            stride_y_m=cols,
            N=cols,
            K=red,
        )
        act = min(E, M)
        tiles = ((M - act) // c.get("BLOCK_ROWS", 128) + act) * -(-cols // c["BLOCK_N"])
    vals.update(
        dy_at=dy.data_ptr() if dy is not None else 0,
        x_at=x.data_ptr(),
        m_sizes=m_sizes.data_ptr(),
        index=0,
        row_weights=0,
        bias=0,
        counter=counter.data_ptr(),
        M=M,
        E=E,
        m_sizes_step=1,
        index_step=1,
        index_end=0,
        x_divisor=1,
        flags=0,
    )
    if c.get("ORACLE"):
        br = c.get("BLOCK_ROWS", 128)
        rows_, o = [], 0
        for e_, c_ in enumerate(m_sizes.tolist()):
            rows_ += [(e_, o + j, o + c_, 0) for j in range(0, c_, br)]
            o += c_
        rows_ += [(-1, 0, 0, 0)] * (tiles - len(rows_))
        orc = torch.tensor(rows_, dtype=torch.int32, device="cuda")
        keep.append(orc)
        vals.update(index=orc.data_ptr())
    if c.get("HOW"):
        vals.update(index=TABLES[c["HOW"]].data_ptr())
    if c.get("FLAGS"):
        vals.update(
            index=(IDENT if c.get("IDENT") else INDEX).data_ptr(),
            index_end=M,
            x_divisor=1,
            flags=c["FLAGS"],
            row_weights=ROWW.data_ptr(),
        )
    if c.get("GATHER"):
        vals.update(index=INDEX.data_ptr(), index_end=M, x_divisor=KTOP, flags=1 | c.get("FLAGS", 0))
    grid = (
        (tiles if c.get("PLAIN") and not c["PERSISTENT"] else min(tiles, c.get("SMS", SM * v["per_sm"])))
        // v.get("cluster", 1)
        * v.get("cluster", 1)
    )
    store, ptrs = [], []

    def put(obj):
        store.append(obj)
        ptrs.append(C.addressof(obj))

    for n, k in v["args"]:
        if k == "desc":
            meta = metas.pop(0)
            p, sizes, strides = vals[n]
            ptrs.append(tmap(meta, p, sizes, strides, c.get("PROMO", 2)))
            for s in sizes:
                put(C.c_int32(0))
            for s in sizes:
                put(C.c_int64(1))
        elif k == "ptr":
            put(C.c_uint64(vals[n] if not isinstance(vals[n], tuple) else vals[n][0]))
        elif k == "i32":
            put(C.c_int32(vals[n]))
        else:
            put(C.c_int64(vals[n]))
    put(C.c_uint64(0))
    put(C.c_uint64(0))
    arr = (C.c_void_p * len(ptrs))(*ptrs)
    keep.append((store, arr))

    def call():
        if c.get("CLEAR"):
            cu.cuMemsetD32Async(
                C.c_uint64(counter.data_ptr()), 0, 1024, C.c_void_p(torch.cuda.current_stream().cuda_stream)
            )
        ck(
            cu.cuLaunchKernel(
                v["fn"],
                grid,
                1,
                1,
                v["threads"],
                1,
                1,
                v["shared"],
                C.c_void_p(torch.cuda.current_stream().cuda_stream),
                arr,
                None,
            ),
            "launch " + v["name"],
        )

    return call


clock = method.Clock()
sink = torch.empty((), dtype=torch.int64, device="cuda")


def rd():
    clock.flush.zero_()
    torch.sum(clock.flush.view(torch.int64)[: 1 << 24], out=sink) if 0 else clock.flush.view(torch.int64).sum()


cells = []
t0 = time.time()


def flushed(graphs, rounds):
    times = {n: [] for n in graphs}
    for r in range(rounds):
        names = list(graphs)
        names = names[r % len(names) :] + names[: r % len(names)]
        ev = []
        for n in names:
            a, b = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            (clock.flush.zero_() if plan.get("flush", "zero") == "zero" else rd())
            a.record()
            graphs[n].replay()
            b.record()
            ev.append((n, a, b))
        torch.cuda.synchronize()
        for n, a, b in ev:
            times[n].append(1000 * a.elapsed_time(b))
    return {n: statistics.median(t) for n, t in times.items()}


def shapes():
    for name in plan.get("models", []):
        E, H, I, k = MODELS[name]
        for gemm, N, K in (("gate_up", 2 * I, H), ("down", H, I)):
            if gemm in plan.get("gemms", ["gate_up", "down"]):
                yield name, gemm, E, N, K, k, "routed"
    for name, gemm, mode, E in plan.get("modes", []):
        E0, H, I, k = MODELS[name]
        yield name, gemm, E or E0, *((2 * I, H) if gemm == "gate_up" else (H, I)), k, mode


if True:
    for name, gemm, E, N, K, k, mode in shapes():
        w = method.weights(E, N, K, DT)
        for op, T in plan["cells"]:
            vs = [v for v in variants if v["op"] == op]
            if not vs:
                continue
            M = T * k
            m_sizes = method.routed_rows(E, k, T) if mode == "routed" else torch.full((E,), M // E, dtype=torch.int32)
            if mode.startswith("+"):
                m_sizes[0::2] += int(mode)
                m_sizes[1::2] -= int(mode)
            M = int(m_sizes.sum())
            KTOP = k
            if any(v["const"].get("GATHER") or v["const"].get("FLAGS") for v in vs):
                TOK = method.activations(T, K, DT)
                perm = torch.randperm(M)
                o = 0
                for c_ in m_sizes.tolist():
                    perm[o : o + c_] = perm[o : o + c_].sort()[0]
                    o += c_
                INDEX = perm.to(torch.int32).cuda()
                IDENT = torch.arange(M, dtype=torch.int32, device="cuda")
                ROWW = torch.exp2(torch.randint(-1, 2, (M,), device="cuda").float())
                x = TOK[(perm // k).cuda()]
            else:
                x = method.activations(M, K, DT)
            if op == "dX" and any(v["const"].get("GATHER") for v in vs):
                DTOK = method.activations(T, N, DT)
                dy = DTOK[(perm // k).cuda()]
            else:
                dy = method.activations(M, N, DT) if op != "forward" else None
            inputs = method.Inputs(x, w, m_sizes.cuda(), dy)
            out = torch.empty({"forward": (M, N), "dX": (M, K), "dW": (E, N, K)}[op], dtype=DT, device="cuda")
            ends = inputs.m_sizes.cumsum(0).to(torch.int32)
            graphs, wrong = {}, {}
            for v in vs:
                out.fill_(float("nan"))
                counter.zero_()
                call = caller(v, op, x, w, dy, out, inputs.m_sizes, E, N, K)
                call()
                torch.cuda.synchronize()
                fl = v["const"].get("FLAGS", 0)
                got = out[(IDENT if v["const"].get("IDENT") else INDEX).long()] if fl & 2 else out
                if fl & 4:
                    got = got / ROWW[INDEX.long(), None].to(got.dtype)
                e = method.relative_error(got, inputs, op)
                del got
                if not e < 1e-2:
                    wrong[v["name"]] = e
                if v["name"] in wrong and not plan.get("roofs"):
                    continue
                graphs[v["name"]] = clock.capture(call)
            if F32:
                cut = [0] + ends.tolist()

                def loop():
                    for e_ in range(E):
                        a_, b_ = cut[e_], cut[e_ + 1]
                        if a_ == b_:
                            continue
                        if op == "forward":
                            torch.mm(x[a_:b_], w[e_].t(), out=out[a_:b_])
                        elif op == "dX":
                            torch.mm(dy[a_:b_], w[e_], out=out[a_:b_])
                        else:
                            torch.mm(dy[a_:b_].t(), x[a_:b_], out=out[e_])

                torch.backends.cuda.matmul.allow_tf32 = True
                graphs["loop"] = clock.capture(loop)
                torch.backends.cuda.matmul.allow_tf32 = False
            elif op == "forward":
                graphs["grouped_mm"] = clock.capture(lambda: torch._grouped_mm(x, w.transpose(1, 2), offs=ends))
            elif op == "dX":
                graphs["grouped_mm"] = clock.capture(lambda: torch._grouped_mm(dy, w, offs=ends))
            else:
                graphs["grouped_mm"] = clock.capture(lambda: torch._grouped_mm(dy.t(), x, offs=ends))
            if plan.get("dense"):
                da, db = (x, w.view(-1, K)[:N]) if op == "forward" else (dy, w.view(-1, K)[:N].t())
                if op == "dW":
                    graphs["dense"] = clock.capture(lambda: torch.mm(dy.t(), x))
                else:
                    graphs["dense"] = clock.capture(
                        lambda: torch.mm(da, db.t() if op == "forward" else w.view(-1, K)[:N])
                    )
            if os.environ.get("QUACK"):
                sys.path.insert(0, sys.argv[4])
                import beside_quack as bq

                qm = bq.quack_module()
                qout = torch.empty(max(M * max(N, K), E * N * K if op == "dW" else 0), dtype=DT, device="cuda")
                for text in plan["quack"][op]:
                    try:
                        q = bq.quack_calls(qm, clock, op, inputs, qout, [bq.Config.parse(text)])[text]()
                        q()
                        torch.cuda.synchronize()
                        graphs["Q " + text] = clock.capture(q)
                    except Exception as e:
                        print(text, repr(e)[:200], flush=True)
            if os.environ.get("PROF"):
                torch.cuda.synchronize()
                torch.cuda.cudart().cudaProfilerStart()
                for v in vs:
                    if os.environ["PROF"] in v["name"]:
                        caller(v, op, x, w, dy, out, inputs.m_sizes, E, N, K)()
                torch.cuda.synchronize()
                torch.cuda.cudart().cudaProfilerStop()
            one = flushed(graphs, 2)
            tot = sum(one.values())
            us = flushed(graphs, max(7, min(30, int(plan.get("budget_ms", 150) * 1000 / tot))))
            cells.append(
                dict(
                    model=name,
                    gemm=gemm,
                    op=op,
                    T=T,
                    mode=mode,
                    E=E,
                    M=M,
                    N=N,
                    K=K,
                    us={n: round(t, 2) for n, t in us.items()},
                    wrong=wrong,
                )
            )
            if not plan.get("quiet"):
                print(
                    f"{name:10} {gemm:7} {op:7} T={T:<5}{mode[:6]:6} E={E:<3}",
                    " ".join(f"{n.removeprefix(op + ' ').removeprefix('fwd ')}={t:.1f}" for n, t in us.items()),
                    f"best {2 * M * N * K / min(us.values()) / 1e6:.0f} TF",
                    "WRONG" if wrong else "",
                    wrong or "",
                    flush=True,
                )
            if plan.get("warm") and op == "forward":
                E2, N2, K2, M2 = 8, 2048, 256, 8 * max(1, M // E)
                w2, x2 = method.weights(E2, N2, K2, DT), method.activations(M2, K2, DT)
                o2, s2 = (
                    torch.empty((M2, N2), dtype=DT, device="cuda"),
                    torch.full((E2,), M2 // E2, dtype=torch.int32, device="cuda"),
                )
                dec = {
                    v["name"]: clock.capture(caller(v, op, x2, w2, None, o2, s2, E2, N2, K2))
                    for v in vs
                    if v["name"] in graphs
                }
                res = {}
                for n in list(dec):
                    for d in list(dec):
                        ts = []
                        for r in range(15):
                            a, b = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
                            clock.flush.zero_()
                            dec[d].replay()
                            a.record()
                            graphs[n].replay()
                            b.record()
                            torch.cuda.synchronize()
                            ts.append(1000 * a.elapsed_time(b))
                        res[f"{n}<{d}"] = round(statistics.median(ts), 2)
                cells[-1]["warm"] = res
                print(name, gemm, T, res, flush=True)
            del graphs, out, x, dy, inputs
            keep.clear()
        del w
        torch.cuda.empty_cache()
json.dump(dict(seconds=time.time() - t0, cells=cells), open(sys.argv[3], "w"))
print("counter", int(counter.abs().sum()), "seconds", time.time() - t0)
