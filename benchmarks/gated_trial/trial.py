"""One model of the trial: python benchmarks/gated_trial/trial.py MODEL OUT.json, after build.py."""

import ctypes
import json
import os
import pickle
import statistics
import sys
import time

import torch

from pretuned.aot.clock import Clock
from pretuned.aot.inputs import routed_rows
from pretuned.artifacts.types import Fusion, Layout
from pretuned.runtime import driver, launch
from pretuned.runtime.activation import activate

MODELS = {
    "qwen3-30b": (128, 2048, 768, 8, False, "silu"),
    "mixtral-8x7b": (8, 4096, 14336, 2, False, "silu"),
    "gpt-oss-20b": (32, 2880, 2880, 4, True, "swiglu_oai"),
}
name, out = sys.argv[1:3]
E, H, I, k, oai, act_name = MODELS[name]
begun = time.time()
acts, built = pickle.load(open(os.path.join(os.path.dirname(os.path.abspath(__file__)), "kernels.pickle"), "rb"))
layout = Layout.KN if oai else Layout.NK
props = torch.cuda.get_device_properties(0)
torch.zeros(1, device="cuda")
kernels = []
for kind, inter, variant, cubin in built:
    if variant.layout is layout and (kind == "Spec" or inter == oai):
        kernels.append((kind, launch.load_kernel(variant, cubin, 0, props.multi_processor_count)))
act_cubin, act_entry, act_shared = acts[oai]
act_fn = driver.load(act_cubin, act_entry, threads=128, shared_bytes=act_shared, device=0)
lib = driver.library()
cu = lib.cuLaunchKernel
cu.argtypes = [ctypes.c_void_p] + [ctypes.c_uint] * 7 + [ctypes.c_void_p] * 3


def one_kernel(h, y):
    total = y.numel()
    vals = (
        ctypes.c_uint64(h.data_ptr()),
        ctypes.c_uint64(y.data_ptr()),
        ctypes.c_int64(total),
        ctypes.c_int32(I),
        ctypes.c_uint64(0),
        ctypes.c_uint64(0),
    )
    ptrs = (ctypes.c_void_p * 6)(*[ctypes.addressof(v) for v in vals])
    code = cu(
        act_fn.handle,
        -(-total // 1024),
        1,
        1,
        128,
        1,
        1,
        act_shared,
        torch.cuda.current_stream().cuda_stream,
        ptrs,
        None,
    )
    assert code == 0, code


g = torch.Generator("cuda").manual_seed(1)
w = torch.empty((E, H, 2 * I) if oai else (E, 2 * I, H), dtype=torch.bfloat16, device="cuda")
for one in w:
    one.copy_(torch.randn(one.shape, generator=g, device="cuda") * 0.05)
bias = torch.randn(E, 2 * I, generator=g, device="cuda").bfloat16() if oai else None
clock = Clock()
cells = []
ACT_BITS = {"silu": 0, "gelu": 1, "gelu_tanh": 2, "swiglu_oai": 3}


class Flags:
    def __init__(self, value):
        self.value = value


def start_of(kind, kernel, x, xs, index, m_sizes, M, result, act=act_name):
    gather = Fusion.GATHER in kernel.variant.fusion
    flags = (1 if gather else 0) | (8 if oai else 0) | (ACT_BITS[act] << 8 if kind == "Gated" else 0)
    start = launch.row_launcher(
        kernel,
        columns=2 * I,
        reduction=H,
        E=E,
        w_kn=oai,
        stride_w_e=w.stride(0),
        stride_w_row=w.stride(1),
        m_sizes_step=1,
        fused=launch.Fused(Flags(flags), 1, k),
    )
    source = x if gather else xs
    extra = (index.data_ptr() if gather else 0, 0, bias.data_ptr() if oai else 0, index.numel() if gather else 0)

    def call():
        start(
            source.data_ptr(),
            w.data_ptr(),
            result.data_ptr(),
            m_sizes.data_ptr(),
            source.stride(0),
            result.stride(0),
            M,
            torch.cuda.current_stream().cuda_stream,
            *extra,
        )

    return call


def error(got, want):
    d = float((got.float() - want).square().sum(dtype=torch.float64))
    return (d / float(want.square().sum(dtype=torch.float64))) ** 0.5


def in_place(h, last):
    gate, up = (h[..., ::2], h[..., 1::2]) if oai else h.chunk(2, -1)
    s = gate.float()
    if oai:
        s.clamp_(max=7.0)
        u = up.float().clamp_(-7.0, 7.0).add_(1)
        s.mul_(torch.sigmoid_(1.702 * s))
    else:
        torch.nn.functional.silu(s, inplace=True)
        u = up
    if last == "to":
        return s.mul_(u).to(h.dtype)
    return torch.mul(u, s, out=torch.empty(s.shape, dtype=h.dtype, device=h.device))


def describe(kernel):
    return str(kernel.config)


for T in (128, 1024, 8192):
    M = T * k
    m_sizes = routed_rows(E, k, T).cuda()
    index = torch.randperm(M, generator=torch.Generator().manual_seed(3)).to(torch.int32).cuda()
    x = torch.randn(T, H, generator=torch.Generator("cuda").manual_seed(2), device="cuda").bfloat16()
    xs = x[index.long() // k]
    # references in fp32, of a slice of experts' rows: h, and act of the unrounded h
    torch.backends.cuda.matmul.allow_tf32 = False
    want = torch.empty(M, I, device="cuda")
    want_h = torch.empty(M, 2 * I, dtype=torch.bfloat16, device="cuda")
    at = 0
    for e, rows in enumerate(m_sizes.tolist()):
        if not rows:
            continue
        m = w[e].float() if oai else w[e].float().T
        hh = xs[at : at + rows].float() @ m
        if oai:
            hh = hh + bias[e].float()
        want[at : at + rows] = activate(hh, act_name, interleaved=oai)
        want_h[at : at + rows] = hh.to(torch.bfloat16)
        at += rows
    y = torch.empty(M, I, dtype=torch.bfloat16, device="cuda")
    h = torch.empty(M, 2 * I, dtype=torch.bfloat16, device="cuda")
    y2 = torch.empty_like(y)
    for form in ("gather", "plain"):
        if form == "plain" and oai:
            continue
        wanted = Fusion.GATHER if form == "gather" else Fusion.NONE
        times, errors, wrong = {}, {}, 0
        rows_each = M / E
        for n, (kind, kernel) in enumerate(kernels):
            if kernel.variant.fusion is not wanted:
                continue
            if kind == "Spec" and not min(64, rows_each / 8) <= kernel.config.block_m <= max(16, 16 * rows_each):
                continue
            result = y if kind == "Gated" else h
            result.fill_(float("nan"))
            call = start_of(kind, kernel, x, xs, index, m_sizes, M, result)
            call()
            errors[n] = error(result, want if kind == "Gated" else want_h.float())
            if kind == "Gated":
                first = y.clone()
                call()
                assert torch.equal(first, y)
            if not errors[n] < 1e-2:
                wrong += 1
                print("WRONG", kind, describe(kernel), errors[n], flush=True)
                continue
            times[n] = clock.median_us(call, 15, 12.0 if T < 8192 else 40.0)
        for kind in ("Gated", "Spec"):
            print(
                name,
                T,
                form,
                kind,
                {
                    describe(kernels[n][1]): round(times[n], 1)
                    for n in sorted(times, key=times.get)[:4]
                    if kernels[n][0] == kind
                },
                flush=True,
            )
        gs = sorted((n for n in times if kernels[n][0] == "Gated"), key=times.get)[:3]
        bests = sorted((n for n in times if kernels[n][0] == "Spec"), key=times.get)[:3]
        if not gs or not bests:
            continue
        heat = 12 if T == 8192 else 20
        sure = {}
        if T >= 1024:  # who is first of each kind, in turns
            both = gs + bests
            graphs = [
                clock.capture(start_of(kernels[n][0], kernels[n][1], x, xs, index, m_sizes, M, y if n in gs else h))
                for n in both
            ]
            sure = {n: statistics.median(r) for n, r in zip(both, clock.rounds_us(graphs, heat))}
            del graphs
            best_g, best_s = min(gs, key=sure.get), min(bests, key=sure.get)
        else:
            best_g, best_s = gs[0], bests[0]
        gated = start_of("Gated", kernels[best_g][1], x, xs, index, m_sizes, M, y)
        plain = start_of("Spec", kernels[best_s][1], x, xs, index, m_sizes, M, h)

        def with_one():
            plain()
            one_kernel(h, y2)

        def with_torch():
            plain()
            return activate(h, act_name, interleaved=oai)

        def with_to():
            plain()
            return in_place(h, "to")

        def with_out():
            plain()
            return in_place(h, "out")

        with_one()
        e_one = error(y2, want)
        today = with_torch()
        e_torch = error(today, want)
        assert torch.equal(today, with_to()) and torch.equal(today, with_out()), "in place differs"
        del today
        names = (
            "fused",
            "gemm",
            "gemm + one kernel",
            "gemm + torch",
            "gemm + torch in place",
            "gemm + torch in place, out",
        )
        graphs = [clock.capture(c) for c in (gated, plain, with_one, with_torch, with_to, with_out)]
        rounds = clock.rounds_us(graphs, 18 if T == 8192 else 25)
        us = {a: round(statistics.median(r), 2) for a, r in zip(names, rounds)}
        bests = [best_s]
        cell = {
            "model": name,
            "form": form,
            "tokens": T,
            "M": M,
            "E": E,
            "N": 2 * I,
            "K": H,
            "activation": act_name,
            "w": layout.value,
            "us": us,
            "fused_over": {
                "one kernel": round(us["gemm + one kernel"] / us["fused"], 4),
                "torch": round(us["gemm + torch"] / us["fused"], 4),
            },
            "configs": {"fused": describe(kernels[best_g][1]), "gemm": describe(kernels[bests[0]][1])},
            "errors": {"fused": errors[best_g], "gemm + one kernel": e_one, "gemm + torch": e_torch},
            "tried_us": {
                f"{'fused ' if kernels[n][0] == 'Gated' else ''}{describe(kernels[n][1])}": round(t, 2)
                for n, t in times.items()
            },
        }
        cells.append(cell)
        print(json.dumps({a: cell[a] for a in ("model", "form", "tokens", "us", "fused_over", "errors")}), flush=True)
        del graphs
    json.dump(
        {"gpu": props.name, "torch": torch.__version__, "seconds": round(time.time() - begun, 1), "cells": cells},
        open(out, "w"),
        indent=1,
    )
    print(name, T, "seconds", round(time.time() - begun, 1), flush=True)
