import os
src='bounds_trial/early/'
F=['pipeline.py','warpgroups.py','specialized.py','specialized_weight.py']
for name,q in (('new2',2),('new4',4),('new8',8)):
    os.makedirs(name,exist_ok=True)
    for f in F:
        t=open(src+f).read()
        if f=='pipeline.py': assert 'gl.constexpr(8)  #' in t; t=t.replace('gl.constexpr(8)  #',f'gl.constexpr({q})  #')
        open(f'{name}/{f}','w').write(t)
    open(f'{name}/__init__.py','w').write('from .specialized import rows_specialized\nfrom .specialized_weight import weight_specialized\n')
