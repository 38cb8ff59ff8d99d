import pickle
from pretuned.artifacts.store import open_bundle
from pretuned.artifacts.types import Op,Fusion,Layout,DType
from pretuned.kernels.config import Config
out=pickle.load(open('variants.pkl','rb'))
b=open_bundle('before.msgpack')
for i,V in enumerate(b.variants()):
    if V.kernel!='rows_specialized' or V.fusion!=Fusion.GATHER or V.alignment!=16 or V.dtype!=DType.BF16 or V.layout!=Layout.NK: continue
    c=Config.from_pairs(V.config)
    if (c.block_m,c.block_n,c.num_stages,c.group_m)!=(128,256,4,8): continue
    cub=b.cubin(i)
    kinds=[(n,"desc" if k.startswith("desc") else k) for n,k in V.arguments]
    maps={m.argument:m for m in V.tensor_maps}
    meta=[dict(block_size=list(maps[n].box),swizzle=maps[n].swizzle) for n,k in V.arguments if k.startswith("desc")]
    const=dict(BLOCK_N=c.block_n,BLOCK_K=c.block_k,BLOCK_ROWS=c.block_m,PLAIN=True,PERSISTENT=c.persistent,BLOCK_M=c.block_m,GATHER=True)
    out.append(dict(name=f"{V.op.value} old",op=V.op.value,cubin=cub,entry=V.entry,args=kinds,meta=meta,threads=V.threads,shared=V.shared_bytes,const=const,cluster=1))
for v in list(out):
    if v['const'].get('GATHER') and 'old' not in v['name']:
        for f in (2,6): out.append(v|dict(name=v['name']+f' f{f}',const=v['const']|dict(FLAGS=f)))
print([v['name'] for v in out]); pickle.dump(out,open('trial.pkl','wb'))
