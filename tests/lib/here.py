"""A server in this process, so that tests can pause, patch and observe it."""

from servers import Server

from engine.loop import Loop, Stopwatch
from server.app import APIServer
from server.http import Options


class Here(Server):
    """A server in this process, with the interface of one in another process."""

    def __init__(self, engine, **options):
        self.api = APIServer(Options(port=0, **options)).start()
        self.loop = Loop(engine, clock=Stopwatch()).start()
        self.api.open(engine, self.loop, "small")
        self.address = self.api.address
        host, port = self.address.removeprefix("http://").split(":")
        self.host, self.port = host, int(port)

    def __exit__(self, *exception) -> None:
        self.api.close()
        self.loop.stop()
