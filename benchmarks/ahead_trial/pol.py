import re
from pretuned.aot import rewriting as R
def hint(word):
    def f(ptx):
        text,count=R._LOAD.subn(lambda one: f"{one[1]}.L2::cache_hint{one[2]}, {word<<52:#x};", ptx)
        assert count, "none"
        return text
    return f
def make(word): return hint(word)
def apply(ptx, word): return hint(word)(ptx)
def swap(word):
    def f(ptx):
        assert "0x12f0000000000000" in ptx
        if word is None:
            return re.sub(r"\.L2::cache_hint( \[[^;]*\]), 0x12f0000000000000;", r"\1;", ptx)
        return ptx.replace("0x12f0000000000000", f"{word<<52:#x}")
    return f
