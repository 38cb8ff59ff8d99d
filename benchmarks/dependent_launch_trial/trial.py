# ruff: noqa
import os, sys, json, statistics, functools

HERE = os.path.dirname(os.path.abspath(__file__))
sys.path.insert(0, HERE + "/..")
import torch, method
from variants import MODELS
from layer import torch_layer
import pretuned.runtime.arguments as A
from pretuned.runtime import moe_mlp, grouped_gemm, reload

B = {m: HERE + f"/{m}.msgpack" for m in ("wait", "both", "passes", "ahead", "ahead2")}
B["base"] = HERE + "/../../artifacts/bundles/catalogue-sm90.msgpack"
MODES = [("base", 0), ("wait", 1), ("both", 1), ("passes", 1), ("ahead", 1), ("ahead2", 1)]


def use(mode):
    os.environ["PRETUNED_BUNDLES"] = B[mode[0]]
    reload()
    A.COUNT = mode[1]


out = []


def timed(clock, what, call, ref=None):
    graphs = []
    errs = []
    for mode in MODES:
        use(mode)
        r = call()
        graphs.append(clock.capture(call))
        if ref is not None:
            errs.append(float((r.float() - ref).norm() / ref.norm()))
    one = sum(t[-1] for t in clock.rounds_us(graphs, 2))
    rounds = clock.rounds_us(graphs, max(5, min(40, int(250000 / max(one, 1)))))
    out.append(dict(what=what, us=[round(statistics.median(t), 2) for t in rounds], err=errs))


@torch.no_grad()
def main():
    clock = method.Clock()
    for name, E, H, width, top_k in MODELS:
        if name not in ("qwen3-30b", "qwen3-next", "olmoe", "mixtral-8x7b"):
            continue
        gate_up = method.weights(E, 2 * width, H, torch.bfloat16)
        down = method.weights(E, H, width, torch.bfloat16)
        for T in (1, 2, 4, 16, 64, 128, 1024, 8192):
            g = torch.Generator().manual_seed(T * 31 + E)
            logits = torch.randn(T, E, generator=g) - 0.3 * torch.log(torch.randperm(E, generator=g) + 1.0)
            weights, ids = logits.softmax(-1).topk(top_k, -1)
            weights, ids = weights.cuda(), ids.cuda()
            hidden = method.activations(T, H, torch.bfloat16)
            ref = torch_layer(hidden, gate_up, down, ids, weights).float()
            timed(clock, f"layer {name} {T}", functools.partial(moe_mlp, hidden, gate_up, down, ids, weights), ref)
            if T <= 16 and T != 2:

                def chain():
                    h = hidden
                    for _ in range(4):
                        h = moe_mlp(h, gate_up, down, ids, weights)
                    return h

                timed(clock, f"chain4 {name} {T}", chain)
                x = method.activations(T * top_k, H, torch.bfloat16)
                m = method.routed_rows(E, top_k, T).cuda()
                timed(clock, f"gate_up {name} {T}", functools.partial(grouped_gemm, x, gate_up, m))
            if T == 1024:
                x = method.activations(T * top_k, width, torch.bfloat16)
                m = method.routed_rows(E, top_k, T).cuda()
                idx = torch.randperm(T * top_k).cuda()
                timed(clock, f"down {name} {T}", functools.partial(grouped_gemm, x, down, m))
                timed(
                    clock,
                    f"scatter down {name} {T}",
                    functools.partial(grouped_gemm, x, down, m, permute_y=True, gather_indices=idx, topk=1),
                )
        json.dump(out, open(sys.argv[1], "w"), indent=0)


main()
