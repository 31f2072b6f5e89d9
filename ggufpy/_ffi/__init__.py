"""The C side: declarations of ggml (decl/), the cffi module made from them (build.py), and its loading (lib.py)."""
