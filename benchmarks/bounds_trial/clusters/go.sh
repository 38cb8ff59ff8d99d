# bash go.sh OUTDIR SECONDS MS: tiny cells with bounded waits, then as they are (under a timeout), then all cells of those that passed
cd "$(dirname "$0")"; out=$1
python3 - $out <<'P'
import pickle, subprocess, sys, json, concurrent.futures as f, time, os
names = [v["name"] for v in pickle.load(open("out.pkl", "rb"))]
t=time.time()
def one(n, ex="1", limit="22"):
    r = subprocess.run(["timeout", "-k", "2", limit, sys.executable, "gpu.py", "tiny", n], capture_output=True, text=True, env=os.environ | {"EX": ex})
    return n, r.returncode, (r.stdout + r.stderr)[-1200:].strip()
def all_(names, **k):
    with f.ThreadPoolExecutor(10) as p: rs = list(p.map(lambda n: one(n, **k), names))
    for r in rs: print(*r, flush=True)
    return [n for n, c, _ in rs if c == 0]
fine = all_([n for n in names if n.endswith(" debug")])
print("bounded", round(time.time()-t,1), "s")
rest = [n for n in names if not n.endswith(" debug") and ((b := n.removesuffix(" g16") + " debug") in fine or b not in names)]
good = all_(rest)
tried = [n for n in good if n + " debug" in names][:1]
if tried: print("plain cuLaunchKernel:", *one(tried[0], "0"))
json.dump(good, open("good.json", "w")); print("tiny", round(time.time()-t,1), "s", good, flush=True)
P
timeout -k 2 $(($2 + 10)) python3 gpu.py all $2 good.json $out/clusters.json $3
