"""HTTP from a client's side: what is a request, who is still there, how answers are framed."""
import random
import re
import socket
import struct
import time

import pytest

import hostile_nodes
import subagent_fleet as sf
from front_rig import LIMIT, read_to_end


def statuses(received):
    """The status of each answer in what came back; every answer must be whole."""
    found = []
    while received:
        head, _, rest = received.partition(b"\r\n\r\n")
        first, *lines = head.decode("ascii").split("\r\n")
        match = re.fullmatch(r"HTTP/1\.1 ([0-9]{3}) [A-Za-z]+", first)
        assert match, received
        fields = dict(line.lower().split(": ", 1) for line in lines)
        length = int(fields.get("content-length", 0))
        assert len(rest) >= length
        found.append(int(match[1]))
        received = rest[length:]
    return found


# -- what is no request --

POST = b"POST /x HTTP/1.1\r\nHost: h\r\n"
CHUNKED = POST + b"Transfer-Encoding: chunked\r\n\r\n"
ATTACKS = {
    "both lengths": POST + b"Content-Length: 3\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
    "both lengths, other order":
        POST + b"Transfer-Encoding: chunked\r\nContent-Length: 5\r\n\r\n0\r\n\r\n",
    "two codings": POST + b"Transfer-Encoding: gzip, chunked\r\n\r\n0\r\n\r\n",
    "two codings in two lines":
        POST + b"Transfer-Encoding: chunked\r\nTransfer-Encoding: identity\r\n\r\n0\r\n\r\n",
    "chunked twice": POST + b"Transfer-Encoding: chunked\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
    "identity": POST + b"Transfer-Encoding: identity\r\nContent-Length: 0\r\n\r\n",
    "vertical tab before chunked": POST + b"Transfer-Encoding: \x0bchunked\r\n\r\n0\r\n\r\n",
    "no-break space behind chunked": POST + b"Transfer-Encoding: chunked\xa0\r\n\r\n0\r\n\r\n",
    "next line behind chunked": POST + b"Transfer-Encoding: chunked\x85\r\n\r\n0\r\n\r\n",
    "empty coding": POST + b"Transfer-Encoding:\r\nContent-Length: 0\r\n\r\n",
    "coding in 1.0": b"POST /x HTTP/1.0\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
    "empty length": POST + b"Content-Length:\r\n\r\n",
    "negative length": POST + b"Content-Length: -1\r\n\r\n",
    "length with a plus": POST + b"Content-Length: +2\r\n\r\nab",
    "hexadecimal length": POST + b"Content-Length: 0x2\r\n\r\nab",
    "length with a blank": POST + b"Content-Length: 1 0\r\n\r\n0123456789",
    "list of lengths": POST + b"Content-Length: 2, 2\r\n\r\nab",
    "digits of another script": POST + "Content-Length: \u0662\r\n\r\nab".encode(),
    "two lengths": POST + b"Content-Length: 2\r\nContent-Length: 9\r\n\r\nab",
    "one length twice": POST + b"Content-Length: 2\r\nContent-Length: 2\r\n\r\nab",
    "two hosts": POST + b"Host: other\r\n\r\n",
    "folded": POST + b"X: a\r\n Transfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
    "folded with a tab": POST + b"X: a\r\n\tContent-Length: 5\r\n\r\n",
    "folded first": b"GET / HTTP/1.1\r\n Host: h\r\n\r\n",
    "no colon": POST + b"Content-Length\r\n\r\n",
    "blank before the colon": POST + b"Content-Length : 5\r\n\r\n",
    "tab before the colon": POST + b"Transfer-Encoding\t: chunked\r\n\r\n",
    "empty name": POST + b": chunked\r\n\r\n",
    "no token for a name": POST + b"Content(Length): 5\r\n\r\n",
    "name with a high byte": POST + b"Content\xadLength: 5\r\n\r\n",
    "NUL in a value": POST + b"X: a\0b\r\n\r\n",
    "NUL in a name": POST + b"X\0: a\r\n\r\n",
    "NUL in the target": b"GET /\0 HTTP/1.1\r\nHost: h\r\n\r\n",
    "escape in a value": POST + b"X: \x1b[2J\r\n\r\n",
    "bare CR in a value": POST + b"X: a\rContent-Length: 5\r\n\r\n",
    "bare CR for a line end": b"GET / HTTP/1.1\rHost: h\r\r",
    "two CRs": POST + b"X: a\r\r\n\r\n",
    "bare LF": b"GET / HTTP/1.1\nHost: h\n\n",
    "bare LF between headers": POST + b"X: a\nContent-Length: 5\r\n\r\n",
    "tabs in the first line": b"GET\t/\tHTTP/1.1\r\nHost: h\r\n\r\n",
    "two blanks in the first line": b"GET  / HTTP/1.1\r\nHost: h\r\n\r\n",
    "0.9": b"GET /\r\n\r\n",
    "another version": b"GET / HTTP/1.2\r\nHost: h\r\n\r\n",
    "HTTP/2": b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
    "lower case": b"get / HTTP/1.1\r\nHost: h\r\n\r\n",
    "TLS": b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03\r\n\r\n",
    "chunk of no size": CHUNKED + b"\r\nab\r\n0\r\n\r\n",
    "chunk of negative size": CHUNKED + b"-2\r\nab\r\n0\r\n\r\n",
    "chunk size with a prefix": CHUNKED + b"0x2\r\nab\r\n0\r\n\r\n",
    "chunk size behind a blank": CHUNKED + b" 2\r\nab\r\n0\r\n\r\n",
    "chunk size behind a vertical tab": CHUNKED + b"\x0b2\r\nab\r\n0\r\n\r\n",
    "chunk size of nine digits": CHUNKED + b"100000000\r\nab\r\n0\r\n\r\n",
    "chunk extension with NUL": CHUNKED + b"2;\0\r\nab\r\n0\r\n\r\n",
    "chunk size ended by LF": CHUNKED + b"2\nab\r\n0\r\n\r\n",
    "chunk ended by LF": CHUNKED + b"2\r\nab\n0\r\n\r\n",
    "chunk longer than it says": CHUNKED + b"2\r\nabc\r\n0\r\n\r\n",
    "broken trailer": CHUNKED + b"2\r\nab\r\n0\r\nno colon\r\n\r\n",
    "folded trailer": CHUNKED + b"2\r\nab\r\n0\r\nX: a\r\n b\r\n\r\n",
    "compressed": POST + b"Content-Encoding: gzip\r\nContent-Length: 2\r\n\r\nab",
}
SMUGGLED = b"GET /smuggled HTTP/1.1\r\nHost: h\r\n\r\n"


@pytest.mark.parametrize("name", ATTACKS)
def test_no_request_is_refused_and_the_connection_ends(front, name):
    assert len(ATTACKS) >= 30
    received = front.tell(ATTACKS[name] + SMUGGLED)
    assert statuses(received) == [400], received
    assert b"\r\nConnection: close\r\n" in received
    assert front.heard == [], "nothing of it is served, and nothing behind it"


@pytest.mark.parametrize("sent", [
    POST + b"Content-Length: 1001\r\n\r\n", POST + b"Content-Length: 9" + b"9" * 5000 + b"\r\n\r\n",
    CHUNKED + b"3e9\r\n", CHUNKED + b"200\r\n" + b"a" * 512 + b"\r\n1f0\r\n", CHUNKED + b"ffffffff\r\n"])
def test_too_long_is_413_by_length_and_in_chunks(front, sent):
    received = front.tell(sent, half_close=False)  # before anything of it is sent
    assert statuses(received) == [413] and front.heard == []


@pytest.mark.parametrize("sent, body", [
    (POST + b"Content-Length: 002\r\n\r\nab", "ab"), (POST + b"content-length:2\t \r\n\r\nab", "ab"),
    (CHUNKED + b"2 ;a=b\r\nab\r\n0002;x\r\ncd\r\n000\r\nT: x\r\n\r\n", "abcd"),
    (POST + b"TRANSFER-ENCODING: Chunked\r\n\r\n0\r\n\r\n", ""), (POST + b"\r\n", ""),
    (POST + b"Content-Length: 1000\r\n\r\n" + b"a" * 1000, "a" * 1000),
    (POST + b"X: \xe9\t~\r\nY:\r\nx: again\r\n\r\n", "")])
def test_what_is_odd_but_right_is_served_and_the_connection_stays(front, sent, body):
    received = front.tell(sent + SMUGGLED)
    assert statuses(received) == [200, 200]
    assert front.heard == [("POST", "/x", body.encode()), ("GET", "/smuggled", b"")]


def test_a_client_that_closes_is_told_so(front):
    for close in (b"close", b"Close", b"keep-alive, close", b"x,close"):
        received = front.tell(b"GET / HTTP/1.1\r\nConnection: " + close + b"\r\n\r\n" + SMUGGLED)
        assert statuses(received) == [200] and b"\r\nConnection: close\r\n" in received


# -- a reader of our own, and what nobody thought of --

HEAD = re.compile(rb"([A-Z]{1,16}) ([!-~]{1,4096}) HTTP/1\.([01])\r\n"
                  rb"((?:[!#$%&'*+.^_`|~0-9A-Za-z-]+:[\t\x20-\x7e\x80-\xff]*\r\n)*)\r\n")
CHUNKS = re.compile(rb"((?:0*[1-9a-fA-F][0-9a-fA-F]{0,2})[ \t]*(?:;[\t\x20-\x7e\x80-\xff]*)?\r\n)"
                    rb"|0+[ \t]*(?:;[\t\x20-\x7e\x80-\xff]*)?\r\n"
                    rb"(?:[!#$%&'*+.^_`|~0-9A-Za-z-]+:[\t\x20-\x7e\x80-\xff]*\r\n)*\r\n")


def fields_in(lines):
    """{name: values} of header lines."""
    fields = {}
    for line in lines.split(b"\r\n")[:-1]:
        name, _, value = line.partition(b":")
        fields.setdefault(name.lower(), []).append(value.strip(b" \t"))
    return fields


def chunks_in(sent, at):
    """(body, where it ends) of a body in chunks; None where it is none, or too long."""
    body = b""
    while True:
        chunk = CHUNKS.match(sent, at)
        if not chunk:
            return None
        at = chunk.end()
        if not chunk[1]:
            return body, at
        size = int(re.match(rb"[0-9a-fA-F]+", chunk[1])[0], 16)
        body += sent[at:at + size]
        at += size + 2
        if len(body) > LIMIT or sent[at - 2:at] != b"\r\n":
            return None


def body_in(sent, at, fields, minor):
    """(body, where it ends) of a request with these fields; None where nothing says so."""
    coding, length = (fields.get(name, []) for name in (b"transfer-encoding", b"content-length"))
    if len(coding) + len(length) > 1:
        return None
    if coding:
        return chunks_in(sent, at) if coding[0].lower() == b"chunked" and minor == b"1" else None
    if not length:
        return b"", at
    size = int(length[0]) if re.fullmatch(rb"[0-9]{1,9}", length[0]) else -1
    return (sent[at:at + size], at + size) if 0 <= size <= min(LIMIT, len(sent) - at) else None


def requests_in(sent):
    """The (method, target, body) that these bytes hold by the grammar of RFC 9112."""
    found, at, closes = [], 0, False
    while not closes:
        head = HEAD.match(sent, at)
        if not head:
            break
        fields = fields_in(head[4])
        whole = body_in(sent, head.end(), fields, head[3])
        if not whole or len(fields.get(b"host", [])) > 1 or fields.get(b"content-encoding"):
            break
        body, at = whole
        found.append((head[1].decode(), head[2].decode(), body))
        options = b",".join(fields.get(b"connection", [])).lower().split(b",")
        closes = head[3] == b"0" or b"close" in [option.strip(b" \t") for option in options]
    return found


WORDS = [b"GET /a HTTP/1.1\r\n", b"POST /b HTTP/1.1\r\n", b"POST /c HTTP/1.0\r\n", b"Host: h\r\n",
         b"Content-Length: 2\r\n", b"Content-Length: 5\r\n", b"Transfer-Encoding: chunked\r\n",
         b"Connection: close\r\n", b"X: y\r\n", b"\r\n", b"\r\n", b"\r\n", b"ab", b"2\r\nab\r\n",
         b"0\r\n\r\n", b"0\r\n", b"2;x=y\r\n", b"\n", b"\r", b" ", b"\t", b":", b"\0", b"\x0b", b"\xa0",
         b"chunked", b"Transfer-Encoding:", b"Content-Length:", b"ffffffff\r\n", b"3e9\r\n"]


def odd_bytes(number):
    """One of the inputs: nothing but bytes, words of HTTP in any order, or a request with a flaw."""
    dice = random.Random(number)
    if number % 3 == 0:
        return bytes(dice.randrange(256) for _ in range(dice.randrange(1, 200)))
    if number % 3 == 1:
        return b"".join(dice.choice(WORDS) for _ in range(dice.randrange(1, 14)))
    whole = bytearray(dice.choice([POST + b"Content-Length: 5\r\n\r\nhello", CHUNKED + b"5\r\nhello\r\n"
                                   b"0\r\n\r\n", b"GET /a HTTP/1.1\r\nHost: h\r\n\r\n"]) * 2)
    for _ in range(dice.randrange(1, 3)):
        at = dice.randrange(len(whole))
        whole[at:at + dice.randrange(2)] = dice.choice(WORDS) if dice.random() < 0.5 else bytes(
            [dice.choice(b"\0\t\n\r :;,019aAzZ\x0b\x7f\xa0")])
    return bytes(whole)


def test_whatever_comes_is_read_as_the_rfc_reads_it_and_the_front_goes_on(front):
    served = 0
    for number in range(600):
        sent = odd_bytes(number)
        del front.heard[:]
        received = front.tell(sent)
        assert front.bugs == [], (number, sent)
        assert front.heard == requests_in(sent), (number, sent)
        assert statuses(received)[:len(front.heard)] == [200] * len(front.heard), (number, sent)
        served += len(front.heard)
    assert served > 50 and statuses(front.tell(SMUGGLED)) == [200]


# -- answers of unknown length --

def test_a_stream_comes_in_chunks_and_the_connection_stays(front):
    received = front.tell(b"GET /stream HTTP/1.1\r\n\r\n" + SMUGGLED)
    head, _, rest = received.partition(b"\r\n\r\n")
    assert b"\r\nTransfer-Encoding: chunked" in head and b"Connection" not in head
    assert rest.startswith(b"4\r\none\n\r\n4\r\ntwo\n\r\n0\r\n\r\nHTTP/1.1 200 OK\r\n")


def test_a_client_of_1_0_gets_its_stream_bare_and_then_the_end(front):
    with front.connect() as connection:
        connection.sendall(b"GET /stream HTTP/1.0\r\nConnection: keep-alive\r\n\r\n" + SMUGGLED)
        head, _, rest = read_to_end(connection).partition(b"\r\n\r\n")
    assert b"Transfer-Encoding" not in head and b"\r\nConnection: close" in head
    assert rest == b"one\ntwo\n"


# -- who sends no more, and who has gone --

def stop_sending(connection):
    connection.shutdown(socket.SHUT_WR)


def reset(connection):
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    connection.close()


@pytest.mark.parametrize("target", ["/wait", "/stream-wait"])
@pytest.mark.parametrize("version", ["1.0", "1.1"])
@pytest.mark.parametrize("leave", [socket.socket.close, reset])
def test_a_client_that_goes_is_known_at_once(front, target, version, leave):
    connection = front.connect()
    connection.sendall(f"GET {target} HTTP/{version}\r\n\r\n".encode())
    while "stream" in target and b"one" not in connection.recv(65536, socket.MSG_PEEK):
        pass
    time.sleep(0.05)
    connection.recv(65536) if "stream" in target else None  # unread bytes would make it a reset
    began = time.monotonic()
    leave(connection)
    assert front.left.wait(5) and time.monotonic() - began < 0.5


@pytest.mark.parametrize("target", ["/wait", "/stream-wait"])
def test_a_client_that_sends_no_more_while_its_answer_is_made_counts_as_gone(front, target):
    with front.connect() as connection:
        connection.sendall(f"GET {target} HTTP/1.1\r\n\r\n".encode())
        stop_sending(connection)
        assert front.left.wait(5)


def test_requests_sent_ahead_are_answered_in_their_order(front):
    front.answer_after.set()
    wait = b"GET /wait HTTP/1.1\r\n\r\n"
    with front.connect() as connection:
        connection.sendall(wait + SMUGGLED + wait.replace(b"\r\n\r\n", b"\r\nConnection: close\r\n\r\n"))
        assert statuses(read_to_end(connection)) == [200] * 3


# -- what is no answer of a node --

ANSWER = b"HTTP/1.1 200 OK\r\n"
NO_ANSWERS = {
    "vertical tab before chunked": b"Transfer-Encoding: \x0bchunked\r\n\r\n2\r\n{}\r\n0\r\n\r\n",
    "no-break space behind chunked": b"Transfer-Encoding: chunked\xa0\r\n\r\n2\r\n{}\r\n0\r\n\r\n",
    "two codings": b"Transfer-Encoding: chunked\r\nTransfer-Encoding: gzip\r\n\r\n2\r\n{}\r\n0\r\n\r\n",
    "empty length": b"Content-Length:\r\n\r\n{}",
    "two lengths": b"Content-Length: 2\r\nContent-Length: 3\r\n\r\n{}",
    "folded": b"X: a\r\n Content-Length: 2\r\n\r\n{}",
    "no colon": b"Content-Length\r\n\r\n{}",
    "blank before the colon": b"Content-Length : 2\r\n\r\n{}",
    "empty name": b": 2\r\n\r\n{}",
    "NUL": b"X: \0\r\n\r\n{}",
    "bare CR": b"X: a\rContent-Length: 2\r\n\r\n{}",
    "chunk size behind a blank": b"Transfer-Encoding: chunked\r\n\r\n\x0b2\r\n{}\r\n0\r\n\r\n",
}


@pytest.mark.parametrize("name", NO_ANSWERS)
def test_what_can_be_read_in_two_ways_is_no_answer(name):
    world = sf.World()
    port = hostile_nodes.listen(hostile_nodes.say(ANSWER + NO_ANSWERS[name]))
    question = sf.Ask("/", lambda reply: bytes(reply.body))
    with pytest.raises(sf.NodeFailure) as caught:
        world.ask(f"http://127.0.0.1:{port}", question, deadline=world.clock() + 5)
    assert caught.value.reason == "bad answer"


def read_in_pieces(sent, size):
    """The body that an Exchange reads when so many bytes come at once; or why it is none."""
    near, far = socket.socketpair()
    exchange = sf.Exchange(near, time.monotonic() + 10, time.monotonic)

    def feed():  # once all that came was taken
        left = len(sent) - feed.at
        far.sendall(sent[feed.at:feed.at + size])
        feed.at += size
        if left <= 0:
            far.close()
            exchange.await_more = None
    feed.at, exchange.await_more = 0, feed
    try:
        exchange.read_head()
        return bytes(exchange.read_all())
    except sf.NodeFailure as failure:
        return failure.detail
    finally:
        exchange.close()
        far.close()


WIKI = b"4\r\nWiki\r\n00005;a=b\r\npedia\r\nA \r\n in chunks\r\n1\r\n.\r\n2\r\n\r\n\r\n0000A\r\n" \
         b"0123456789\r\n3\r\nend\r\n"


@pytest.mark.parametrize("size", [*range(1, 24), 1000])
@pytest.mark.parametrize("sent, wanted", [
    (WIKI + b"0\r\n\r\n", b"Wikipedia in chunks.\r\n0123456789end"),
    (WIKI + b"000;x\r\nTrailer: x\r\n\r\n", b"Wikipedia in chunks.\r\n0123456789end"),
    (WIKI.replace(b"3\r\nend", b"3\nend") + b"0\r\n\r\n", "its chunks have no readable size"),
    (WIKI, "it closed the connection in the middle of the answer"),
    (WIKI + b"5\r\nabc", "it closed the connection 2 bytes early"),
    (WIKI + b"2\r\nabc\r\n0\r\n\r\n", "a chunk is longer than it said"),
    (WIKI + b"4\r\nab\r\n0\r\n\r\n", "a chunk is longer than it said"),
    (WIKI + b"+2\r\nab\r\n0\r\n\r\n", "its chunks have no readable size"),
    (WIKI + b"1_0\r\nab\r\n0\r\n\r\n", "its chunks have no readable size"),
    (WIKI + b"\r\n2\r\nab\r\n0\r\n\r\n", "its chunks have no readable size")])
def test_chunks_are_read_alike_however_they_come(sent, wanted, size):
    assert read_in_pieces(ANSWER + b"Transfer-Encoding: chunked\r\n\r\n" + sent, size) == wanted


def test_bad_requests_have_their_slug():
    assert sf.BadRequest(400, "x").slug == "bad-request"
