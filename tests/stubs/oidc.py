"""An identity provider as OpenID Connect describes it: discovery, keys, code flow with PKCE."""

from __future__ import annotations

import base64
import hashlib
import json
import secrets
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import parse_qs, urlencode, urlsplit

import jwt
from cryptography.hazmat.primitives.asymmetric import rsa

CLIENT_ID, CLIENT_SECRET = "mindrouter", "oidc-client-secret"


class Provider:
    """Vouches for whoever ``claims`` says. What it would refuse is in ``refusals``."""

    def __init__(self, port: int) -> None:
        self.claims: dict[str, Any] = {"sub": "1"}
        self.refusals: list[str] = []
        self.audience = CLIENT_ID
        self._codes: dict[str, dict[str, str]] = {}
        self._tokens: set[str] = set()
        self._key = rsa.generate_private_key(public_exponent=65537, key_size=2048)
        provider = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                provider._answer(self, {})

            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers.get("Content-Length", 0))).decode()
                provider._answer(self, _flat(body))

            def log_message(self, *_: Any) -> None:
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", port), Handler)
        self.issuer = f"http://127.0.0.1:{port}"
        threading.Thread(target=self._server.serve_forever, daemon=True).start()

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()

    def _answer(self, handler: BaseHTTPRequestHandler, form: dict[str, str]) -> None:
        parts = urlsplit(handler.path)
        if parts.path == "/authorize":
            handler.send_response(302)
            handler.send_header("Location", self._authorize(_flat(parts.query)))
            handler.end_headers()
            return
        bearer = handler.headers.get("Authorization", "").removeprefix("Bearer ")
        pages: dict[str, Any] = {
            "/.well-known/openid-configuration": self._configuration,
            "/keys": self._keys,
            "/token": lambda: self._token(form),
            "/userinfo": lambda: self.claims if bearer in self._tokens else self._refuse("token"),
        }
        document = pages[parts.path]()
        handler.send_response(400 if "error" in document else 200)
        handler.send_header("Content-Type", "application/json")
        handler.end_headers()
        handler.wfile.write(json.dumps(document).encode())

    def _configuration(self) -> dict[str, Any]:
        return {
            "issuer": self.issuer,
            "authorization_endpoint": f"{self.issuer}/authorize",
            "token_endpoint": f"{self.issuer}/token",
            "userinfo_endpoint": f"{self.issuer}/userinfo",
            "jwks_uri": f"{self.issuer}/keys",
            "response_types_supported": ["code"],
            "subject_types_supported": ["public"],
            "id_token_signing_alg_values_supported": ["RS256"],
            "token_endpoint_auth_methods_supported": ["client_secret_post"],
            "code_challenge_methods_supported": ["S256"],
        }

    def _keys(self) -> dict[str, Any]:
        jwk = json.loads(jwt.algorithms.RSAAlgorithm.to_jwk(self._key.public_key()))
        return {"keys": [{**jwk, "kid": "1", "use": "sig", "alg": "RS256"}]}

    def _authorize(self, asked: dict[str, str]) -> str:
        if asked.get("client_id") != CLIENT_ID or asked.get("response_type") != "code":
            self._refuse("client")
        if asked.get("code_challenge_method") != "S256" or "openid" not in asked["scope"].split():
            self._refuse("no PKCE")
        code = secrets.token_urlsafe()
        self._codes[code] = asked
        return f"{asked['redirect_uri']}?{urlencode({'code': code, 'state': asked['state']})}"

    def _token(self, form: dict[str, str]) -> dict[str, Any]:
        asked = self._codes.pop(form.get("code", ""), None)  # each is good for once
        if asked is None:
            return self._refuse("code")
        if form.get("client_secret") != CLIENT_SECRET or form.get("client_id") != CLIENT_ID:
            return self._refuse("client's secret")
        digest = hashlib.sha256(form.get("code_verifier", "").encode()).digest()
        if base64.urlsafe_b64encode(digest).rstrip(b"=").decode() != asked["code_challenge"]:
            return self._refuse("PKCE")
        if form.get("redirect_uri") != asked["redirect_uri"]:
            return self._refuse("redirect_uri")
        token = secrets.token_urlsafe()
        self._tokens.add(token)
        now = int(time.time())
        claims = {**self.claims, "iss": self.issuer, "aud": self.audience, "iat": now}
        signed = jwt.encode({**claims, "exp": now + 60}, self._key, "RS256", {"kid": "1"})
        return {"access_token": token, "token_type": "Bearer", "id_token": signed}

    def _refuse(self, what: str) -> dict[str, Any]:
        self.refusals.append(what)
        return {"error": "invalid_grant"}


def _flat(query: str) -> dict[str, str]:
    return {name: values[0] for name, values in parse_qs(query).items()}
