"""Pages of the documentation that are made from the code when the site is built (mkdocs hooks).

    python docs/building.py settings|sdks      # prints one of them

``settings.md`` lists every environment variable that the code reads, ``sdks.md`` the snippets that
the pages show to users.
"""

from __future__ import annotations

import ast
import os
import re
import sys
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).resolve().parents[1]
SETTINGS = ROOT / "mindrouter" / "settings.py"
_READERS = {"env_number", "secret", "get", "str", "int", "bool", "list", "float", "email_url"}

#: What the comments in settings.py and the settings page do not say.
WORDS = {
    "HOST": "Where the router listens.",
    "PORT": "The port; the demo's servers take it plus 1000 and 1001.",
    "MINDROUTER_DATA": "Folder of the database (SQLite), spool, sockets and generated secrets.",
    "MINDROUTER_ADMIN_PASSWORD": "Of the first administrator, `admin`; otherwise one is printed.",
    "MINDROUTER_URL": "The site that the command line asks; see [Command line](command-line.md).",
    "MINDROUTER_KEY": "Its key there.",
    "MINDROUTER_DEMO_MODEL": "A model file for the demo instead of the downloaded one.",
    "DEMO": "`0`: without the demo's servers.",
    "DEBUG": "Django's debug mode; never in production.",
    "SECRET_KEY": "Signs sessions. Generated into the data folder unless given.",
    "FIELD_ENCRYPTION_KEY": "Encrypts stored secrets. Generated into the data folder unless given.",
    "CLUSTER_PASSWORD": "Of what `make cluster` starts; generated unless given.",
    "OIDC_CLIENT_ID": "What this site is called at the identity provider.",
    "OIDC_CLIENT_SECRET": "Its secret there.",
    "OIDC_NAME": "What the button for signing in there says.",
    "OIDC_GROUP_CLAIM": "The claim that names a person's groups.",
    "ALLOWED_HOSTS": "Names under which the pages answer.",
    "CSRF_TRUSTED_ORIGINS": "Other origins whose forms are accepted, with their scheme.",
    "CORS_ALLOWED_ORIGINS": "Origins of browsers that may call the API.",
    "SESSION_HOURS": "How long a sign-in lasts.",
    "DATABASE_URL": "`postgres://user:password@host/name`; otherwise SQLite in the data folder.",
    "DATABASE_POOL_SIZE": "Connections to PostgreSQL of each process, at most.",
    "DEFAULT_FROM_EMAIL": "Who mails come from.",
    "NOTICE_WEBHOOK": "Address that gets warnings of budgets and expiring keys as JSON.",
    "KEY_REMINDER_DAYS": "Days before a key ends in which its owner is reminded.",
    "CURRENCY": "Of models' prices.",
    "TIME_ZONE": "Whose calendar budgets and reports follow.",
    "BACKEND_POLL_INTERVAL": "Seconds between polls of a backend that sets none itself.",
    "BACKEND_CONNECT_TIMEOUT": "Seconds to connect, for backends that set none themselves.",
    "BACKEND_FIRST_BYTE_TIMEOUT": "Seconds until the first byte of an answer, likewise.",
    "BACKEND_CHUNK_TIMEOUT": "Seconds between two pieces of an answer, likewise.",
    "TELEMETRY_INTERVAL": "Seconds between stored rows of GPUs and backends.",
    "TELEMETRY_RETENTION": "Days that they are kept.",
    "VLLM_MAX_NUM_SEQS": "Slots of a new vLLM backend that names none.",
    "VLLM_MAX_QUEUE_DEPTH": "Bound of its queue.",
    "SHUTDOWN_GRACE": "Seconds that running streams get at a stop.",
    "LOG_LEVEL": "`DEBUG`, `INFO`, `WARNING` or `ERROR`.",
    "SCHEDULER_WEIGHT_STUDENT": "Weight of a group of that name that has none (deprecated).",
    "SCHEDULER_WEIGHT_STAFF": "Likewise.",
    "SCHEDULER_WEIGHT_FACULTY": "Likewise.",
    "SCHEDULER_WEIGHT_ADMIN": "Likewise.",
    "OTEL_EXPORTER_OTLP_ENDPOINT": "Where spans go, of gateway and recorder; none: nowhere.",
    "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT": "The same, for spans alone.",
    "OTEL_SDK_DISABLED": "`true`: no spans, whatever else is set.",
    "OTEL_TRACES_SAMPLER_ARG": "The part (0 to 1) of traces without a client's context to record.",
    "OTEL_SERVICE_NAME": "What the spans' service is called; none: mindrouter.",
    "DECISION_STREAM_SECRET": "Signs what a webhook gets.",
    "DECISION_STREAM_MAX_BYTES": "The most that waits for a webhook.",
    "LOG_FORMAT": "`console` or `json`.",
    "LOG_REQUESTS": "A line for each request, written by the recorder.",
    "ENERGY_PRICE": "Of a kilowatt hour, in `CURRENCY`.",
}


class Variable(NamedTuple):
    name: str
    default: str
    comment: str  # above it in the code


def variables() -> dict[str, Variable]:
    """Every environment variable that the code reads, in the order of settings.py."""
    found: dict[str, Variable] = {}
    folders = ("mindrouter", "scheduler", "backends", "accounts")
    paths = [SETTINGS, *(path for one in folders for path in sorted((ROOT / one).rglob("*.py")))]
    for path in paths:
        text = path.read_text()
        lines = text.splitlines()
        for node in ast.walk(ast.parse(text)):
            name = _read_name(node)
            if name and name not in found:
                line = getattr(node, "lineno", 1)
                found[name] = Variable(name, _default(node), _comment(lines, line))
    return found


def _read_name(node: ast.AST) -> str:
    """The variable that an expression reads from the environment; empty: none."""
    match node:
        case ast.Call(func=ast.Name(id=reader), args=[ast.Constant(value=str(name)), *_]):
            return name if reader in ("env_number", "secret") else ""
        case ast.Call(
            func=ast.Attribute(value=owner, attr=reader), args=[ast.Constant(value=str(name)), *_]
        ):
            return name if reader in _READERS and _is_environment(owner) else ""
        case ast.Subscript(value=owner, slice=ast.Constant(value=str(name))):
            return name if _is_environment(owner) and name.isupper() else ""
    return ""


def _is_environment(owner: ast.AST) -> bool:
    return ast.unparse(owner) in ("env", "os.environ")


def _default(node: ast.AST) -> str:
    if not isinstance(node, ast.Call):
        return "none"
    given = [*node.args[1:], *(one.value for one in node.keywords if one.arg == "default")]
    if not given:
        return "none"
    try:
        value = eval(compile(ast.Expression(given[0]), "", "eval"), {"__builtins__": {}})  # noqa: S307  our own source
    except (NameError, TypeError, SyntaxError):
        return "generated" if isinstance(given[0], ast.Lambda) else "in the data folder"
    if callable(value):
        return "generated"
    if isinstance(value, bool):
        return "on" if value else "off"
    if value in ("", None, []):
        return "none"
    shown = ",".join(value) if isinstance(value, list) else str(value)
    return f"`{shown}`"


def _comment(lines: list[str], number: int) -> str:
    """Beside it, or above the lines that it stands among, in one line; a heading is none."""
    if "  # " in lines[number - 1]:
        return lines[number - 1].partition("  # ")[2]
    found: list[str] = []
    for line in reversed(lines[: number - 1]):
        text = line.strip()
        if not text or text.startswith("# ----") or (found and not text.startswith("# ")):
            break
        if text.startswith("# "):
            found.insert(0, text.removeprefix("# "))
    return " ".join(found)


def settings_page() -> str:
    """Django must be set up."""
    from scheduler.checks import NUMBERS
    from scheduler.settings_admin import GROUPS
    from scheduler.snapshot import setting_name

    known = variables()
    out = [
        "# Every setting",
        "",
        "Made from the code. All are environment variables. What has a page can be saved there, "
        "in force within 5 s; the saved value wins.",
    ]
    for group, rows in GROUPS.items():
        out += ["", f"## {group}", "", "*With a page:* `/admin/scheduler/sitesettings/`", ""]
        out += ["| variable | default | unit | at least | what |", "|---|---|---|---|---|"]
        for field, setting in rows.items():
            one = known.pop(setting_name(field))
            words = setting.effect
            if one.default == "none":
                words += f" Without a value: {setting.without}."
            out.append(_row(one, setting.unit, words, NUMBERS))
    out += ["", "## Only from the environment", ""]
    out += ["| variable | default | at least | what |", "|---|---|---|---|"]
    out += [_row(one, None, described(one), NUMBERS) for one in known.values()]
    return "\n".join([*out, ""])


def described(one: Variable) -> str:
    return WORDS.get(one.name) or one.comment


def _row(
    one: Variable, unit: str | None, words: str, numbers: Mapping[str, tuple[float, bool]]
) -> str:
    least = f"{numbers[one.name][0]:g}" if one.name in numbers else ""
    cells = [f"`{one.name}`", one.default, *([] if unit is None else [unit]), least, words]
    return f"| {' | '.join(cells)} |"


def sdks_page() -> str:
    from scheduler.snippets import snippets

    out = [
        "# From each client",
        "",
        "Made from the code that `/account/clients/` shows with the site's address. Of a client "
        "only the address and the key change; see [Clients](clients.md) for what each API can do.",
    ]
    for one in snippets("https://llm.uni.example", "qwen3"):
        language = "sh" if one.text.startswith(("curl", "docker")) else "python"
        out += [
            "",
            f"## {one.name}",
            "",
            f"*{one.hint}*",
            "",
            f"```{language}",
            one.text.strip(),
            "```",
        ]
    return "\n".join([*out, ""])


PAGES = {"settings.md": settings_page, "sdks.md": sdks_page}


def set_up() -> None:
    """Django, on a data folder of its own."""
    import django

    sys.path.insert(0, str(ROOT))
    os.environ.setdefault("DJANGO_SETTINGS_MODULE", "mindrouter.settings")
    with tempfile.TemporaryDirectory() as folder:
        os.environ.setdefault("MINDROUTER_DATA", folder)
        django.setup()


# ---- mkdocs hooks


def on_files(files: Any, config: Any) -> Any:
    from mkdocs.structure.files import File

    set_up()
    for name, make in PAGES.items():
        files.append(File.generated(config, name, content=make()))
    return files


def on_page_markdown(markdown: str, **_: Any) -> str:
    """Links to files of the repository that are no pages become their names; they must be there."""
    return re.sub(r"\[([^\]]+)\]\(\.\./([^)#]+)[^)]*\)", _named, markdown)


def _named(link: re.Match[str]) -> str:
    path = ROOT / link[2]
    if not path.exists():
        raise FileNotFoundError(f"The documentation names {link[2]}, which is not there.")
    return link[1] if link[1].strip("`") == link[2] else f"{link[1]} (`{link[2]}`)"


def _main(arguments: list[str]) -> Iterator[str]:
    set_up()
    for name in arguments:
        yield PAGES[f"{name}.md"]()


if __name__ == "__main__":
    sys.stdout.writelines(_main(sys.argv[1:]))
