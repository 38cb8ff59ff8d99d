import pickle,subprocess,os,triton,collections,re,sys
t=os.path.join(os.path.dirname(triton.__file__),"backends/nvidia/bin/nvdisasm")
if not os.path.exists(t): t=t.replace('nvdisasm','cuobjdump')
for v in pickle.load(open(sys.argv[1],'rb')):
    open('a.cubin','wb').write(v['cubin'])
    s=subprocess.run([t,"-c","a.cubin"] if 'nvdisasm' in t else [t,"-sass","a.cubin"],capture_output=True,text=True).stdout
    ops=collections.Counter(m[1] for m in re.finditer(r"/\*[0-9a-f]{4,}\*/\s+(?:@!?U?P\w+ )?([A-Z][A-Z0-9_]*)",s))
    print(v['name'],{k:ops[k] for k in ('CS2R','HGMMA','MOV','IMAD','BAR','SHFL','STSM','F2FP','FSEL','SEL')},sum(ops.values()))
