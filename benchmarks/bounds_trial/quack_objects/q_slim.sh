#!/bin/bash
# q_slim.sh OUT: OUT/slim.tar.xz, a site folder without QuACK's compiler: tvm_ffi, and QuACK's kernels compiled here (q_link.py).
set -euo pipefail
out=$1; mkdir -p "$out"; site=$(mktemp -d)
unzip -qo WHEELS/apache_tvm_ffi-0.1.15.post2-*.whl -d "$site"
rm -rf "$site"/tvm_ffi/include "$site"/tvm_ffi/src "$site"/tvm_ffi/3rdparty "$site"/build_backend.py
# What compiled them, for the versions in the report.
unzip -qo WHEELS/quack_kernels-0.6.5-*.whl '*.dist-info/METADATA' -d "$site"
unzip -qo WHEELS/nvidia_cutlass_dsl-4.8.1-*.whl '*.dist-info/METADATA' -d "$site"
unzip -qo WHEELS/nvidia_cutlass_dsl_libs_cu13-4.8.1-*.whl '*.dist-info/METADATA' -d "$site"
mkdir -p "$site/quack"; cp -r WORK/q_slim/quack/__init__.py WORK/q_slim/quack/gemm.py WORK/q_slim/quack/kernels "$site/quack/"
tar -C "$site" --sort=name --owner=0 --group=0 --mtime=@0 -cf - . | xz -9e -T1 > "$out/slim.tar.xz"
rm -rf "$site"; ls -l "$out/slim.tar.xz"
