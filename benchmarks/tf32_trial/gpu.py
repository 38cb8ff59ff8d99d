import sys,pickle,json,torch,statistics,os
B=sys.argv[1]; sys.path.insert(0,B)
import method
from kernels import matmul_loop
from pretuned.runtime import launch, grouped_gemm_dW
torch.backends.cuda.matmul.allow_tf32=True
jobs=pickle.load(open(sys.argv[2],'rb'))
sm=torch.cuda.get_device_properties(0).multi_processor_count
loaded=[]
for n,v,c in jobs:
    try: loaded.append((n,launch.load_kernel(v,c,0,sm)))
    except Exception as e: print(n,'load',str(e)[:150])
clock=method.Clock(); res=[]
for model,E,N,K,k in (('olmoe down',64,2048,1024,8),('mixtral down',8,4096,14336,2),('mixtral gate_up',8,28672,4096,2)):
    for T in (1024,8192):
        M=T*k; m_sizes=method.routed_rows(E,k,T).cuda()
        dy=torch.randn(M,N,device='cuda'); x=torch.randn(M,K,device='cuda'); dw=torch.full((E,N,K),float('nan'),device='cuda')
        inp=method.Inputs(x,None,m_sizes,dy)
        want=None
        ends=m_sizes.cumsum(0).tolist(); s0=ends[0]-int(m_sizes[0])
        graphs={}; err={}
        e=int(m_sizes.argmax()); a=ends[e]-int(m_sizes[e]); ref=(dy[a:ends[e],:512].double().T@x[a:ends[e],:512].double())
        for n,kern in loaded:
            l=launch.weight_launcher(kern,N=N,K=K,E=E,stride_dw_e=N*K,stride_dw_row=K,m_sizes_step=1)
            def call(l=l):
                l(dy.data_ptr(),x.data_ptr(),dw.data_ptr(),m_sizes.data_ptr(),N,K,M,torch.cuda.current_stream().cuda_stream)
            dw.fill_(float('nan')); call(); torch.cuda.synchronize()
            err[n]=float((dw[e,:512,:512].double()-ref).norm()/ref.norm()); bad=int(dw.isnan().sum())
            if err[n]>2e-3 or bad: print(n,'WRONG',err[n],bad); continue
            graphs[n]=clock.capture(call)
        graphs['loop']=clock.capture(matmul_loop('dW',inp))
        names=list(graphs); r=clock.rounds_us([graphs[n] for n in names],5 if T>1024 else 9)
        us={n:statistics.median(t) for n,t in zip(names,r)}
        lo=us['loop']; print(model,T,'loop',round(lo,1),'TF',round(2*M*N*K/lo/1e6,1)); 
        for n in sorted(us,key=us.get)[:9]: print('    ',n,round(us[n],1),'x loop',round(lo/us[n],3), 'err %.1e'%err.get(n,0))
        res.append({'model':model,'T':T,'us':us,'err':err}); del graphs; dw=None
json.dump(res,open(os.environ.get('OUT','.')+'/tf.json','w'))
