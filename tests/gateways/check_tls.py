# packages: openai==2.54.0 grpcio==1.76.0 grpcio-reflection==1.76.0
# programs: openssl
# quick
"""OpenAI's own client where a host asks for TLS and tokens, as it has to beyond loopback."""
import ssl

import httpx
import openai

import certificates
import hotcell
import proxied


def client(cell, token, **options):
    context = ssl.create_default_context(cafile=f"{certificates.secrets()[0]}/ca.pem")
    # The certificate is for the host's name, not its address.
    context.check_hostname = False
    own = httpx.Client(verify=context, **options)
    return openai.OpenAI(base_url=f"https://{cell.http}/v1", api_key=token, max_retries=0, timeout=60, http_client=own)


def check_http_1_1(cell):
    """As it comes it offers nothing else while it greets."""
    asked = {"prompt": "In the beginning", "max_tokens": 24, "temperature": 0}
    done = client(cell, certificates.secrets()[1]).completions.create(model="kjv", **asked)
    assert done.choices[0].text == cell.command("generate", "--model", "kjv", "In the beginning", "--max-tokens", "24", "--temperature", "0").removesuffix("\n")


def check_wrong_tokens(cell):
    for token in ("none", certificates.secrets()[1][:-1] + "x"):
        try:
            client(cell, token).models.list()
            raise AssertionError("it was let in")
        except openai.AuthenticationError as error:
            assert error.status_code == 401 and error.body["message"], error.body


hotcell.main(globals(), *proxied.flags())
