"""Federations over real sockets and real files."""
