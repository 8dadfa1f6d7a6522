"""What a request can be refused for."""


class RequestError(ValueError):
    """The request asks for what cannot be done; the message says what, and what can be."""


class QueueFull(RuntimeError):
    """The request was not looked at: as many wait as may. It can be sent again later."""
