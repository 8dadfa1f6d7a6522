"""The chat page's files, read once, and the headers they are sent with."""

from pathlib import Path

FOLDER = Path(__file__).parent / "page"
CONTENT_TYPES = {
    ".html": "text/html; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".svg": "image/svg+xml",
}
# Nothing from elsewhere, nothing inline: markup that got into the page could neither run nor call home.
CONTENT_SECURITY_POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; img-src 'self' data:; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
HEADERS = {
    "Content-Security-Policy": CONTENT_SECURITY_POLICY,
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-cache",  # a newer server's page is never mixed with an older one's
}


def page_files() -> dict[str, tuple[bytes, str]]:
    """Path to bytes and content type, of each file as it is served; `/` is the page itself."""
    files = sorted(path for path in FOLDER.iterdir() if path.suffix in CONTENT_TYPES)
    names = {path: "" if path.name == "index.html" else path.name for path in files}
    return {f"/{names[path]}": (path.read_bytes(), CONTENT_TYPES[path.suffix]) for path in files}
