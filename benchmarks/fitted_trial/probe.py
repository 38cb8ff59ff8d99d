# ruff: noqa
import ctypes as C, json, sys, torch, os

cu = C.CDLL("libcuda.so.1")
torch.zeros(1, device="cuda")
data = open(os.path.dirname(os.path.abspath(__file__)) + "/probe.cubin", "rb").read()
mod, fn = C.c_void_p(), C.c_void_p()
assert not cu.cuModuleLoadData(C.byref(mod), data)
assert not cu.cuModuleGetFunction(C.byref(fn), mod, b"probe")
sm = torch.cuda.get_device_properties(0).multi_processor_count
cu.cuFuncSetAttribute(fn, 8, 200 << 10)
n, st = 512, 8192 + 128
buf = torch.zeros(n * st // 4 + 64, dtype=torch.int32, device="cuda")
out = torch.zeros(sm, n, dtype=torch.int32, device="cuda")
a = [C.c_uint64(buf.data_ptr()), C.c_uint64(out.data_ptr()), C.c_uint32(n), C.c_uint32(st)]
p = (C.c_void_p * 4)(*[C.addressof(x) for x in a])
for _ in range(2):
    assert not cu.cuLaunchKernel(fn, sm, 1, 1, 1, 1, 1, 200 << 10, None, p, None)
    torch.cuda.synchronize()
lat = out.cpu().float()
z = lat - lat.mean(0, keepdim=True)
z = z - z.mean(1, keepdim=True)
u, s, v = torch.linalg.svd(z, full_matrices=False)
side = (u[:, 0] > 0).int()
print(
    "latency", lat.min().item(), lat.median().item(), lat.max().item(), "singular", [round(x) for x in s[:10].tolist()]
)
print("u0", sorted(round(x, 3) for x in u[:, 0].tolist()))
print("side", side.tolist(), int(side.sum()))
json.dump({"lat": lat.int().tolist(), "side": side.tolist()}, open(sys.argv[1], "w"))
