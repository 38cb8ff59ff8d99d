"""The contract between compiler and launcher: configs, arguments and entries. No torch, no Triton."""
