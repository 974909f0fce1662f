"""HTTP/1.1 for the server: one connection class that reads every request, built on public interfaces only.

    Server       listens on sockets, and stops gracefully (server.py)
    Connection   finds heads and bodies in the bytes that arrive, and sends the responses in order (connection.py)
    Head         parses what precedes a body, with httptools (head.py)
    Request      one request, as the application sees it (request.py)
    Response     one response: its body is a list of parts, or a stream of parts (response.py)
    Outgoing     writes responses as fast as the client reads them (outgoing.py)
    Uptime       a clock that does not count the time in which the process stood still (uptime.py)
    Deadline     a deadline by that clock (uptime.py)

An application (the `Application` of connection.py; `App` in this server) has a method `begin`. The connection calls it
with one request at a time, as soon as the request's head is there and all earlier requests of the connection are
answered. The application says where the body goes (`request.receive`, or `request.skip`) and answers once
(`request.send`), at once or later.
"""
