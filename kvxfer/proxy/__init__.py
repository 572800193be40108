"""A small prefill/decode HTTP proxy, for trying connectors out.

One request becomes two: a prefill engine computes the prompt's KV and answers with
``kv_transfer_params``; a decode engine gets the client's own request with those params and answers
the client. The proxy never guesses: without params it says so instead of sending a plain request.

It is no router: round robin, no queue. What one engine has not answered when it goes another one
gets, as long as the client has got nothing. Importing this package loads no HTTP library;
``kvxfer.proxy.server`` needs the extra ``proxy``.
"""
