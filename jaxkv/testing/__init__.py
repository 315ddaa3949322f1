"""What tests, the demo and downstream projects check jaxkv against.

`oracle` says in plain NumPy what every move of KV must do; `llama` is a small model whose paged
cache can be moved. Both are imported as modules: `from jaxkv.testing import llama, oracle`.
"""
