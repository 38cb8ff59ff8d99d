import json
P=[(m,g,"dW",8192) for m in ("qwen3-30b","olmoe","gpt-oss-20b","mixtral-8x7b") for g in ("gate_up","down")]
P+=[("mixtral-8x7b",g,o,1024) for g in ("down","gate_up") for o in ("forward","dX")]
P+=[(m,g,o,8192) for m,g in (("qwen3-30b","gate_up"),("qwen3-30b","down"),("qwen3-next","gate_up"),("qwen3-next","down"),("gpt-oss-20b","down"),("deepseek-v3","down")) for o in ("forward","dX")]
P+=[("mixtral-8x7b",g,o,8192) for g in ("gate_up","down") for o in ("forward","dX")]+[("qwen3-30b",g,o,1024) for g in ("gate_up","down") for o in ("forward","dX","dW")]
order={"qwen3-30b":0,"olmoe":1,"gpt-oss-20b":2,"mixtral-8x7b":3,"qwen3-next":4,"deepseek-v3":5}
P.sort(key=lambda c:(order[c[0]],c[1]))
json.dump(P,open("plan.json","w"))
