# packages: perfetto==0.59.1 protobuf==7.36.2
# quick
"""Perfetto's own protobuf bindings read what `hotcell debug trace` writes: tracks, slices, counters, and a worker's death."""
import contextlib
import json
import threading
import time

from google.protobuf.unknown_fields import UnknownFieldSet
from perfetto.protos.perfetto.trace.perfetto_trace_pb2 import CounterDescriptor, Trace, TracePacket, TrackEvent

import hotcell

PROMPT = "In the beginning"


class Timeline:
    """A trace put together as Perfetto does it: descriptors first, then events by their tracks."""

    def __init__(self, path):
        self.trace = Trace()
        data = path.read_bytes()
        assert self.trace.ParseFromString(data) == len(data)
        self.tracks, self.slices, self.moments, self.counts = {}, [], [], {}
        first, clock, open_slices = True, 0, {}
        for packet in self.trace.packet:
            assert packet.trusted_packet_sequence_id == 1, "an event of no sequence is dropped"
            assert bool(packet.sequence_flags & TracePacket.SEQ_INCREMENTAL_STATE_CLEARED) == first
            first = False
            self.known(packet)
            kind = packet.WhichOneof("data")
            if kind == "track_descriptor":
                track = packet.track_descriptor
                assert track.uuid and track.uuid not in self.tracks, track
                assert not track.parent_uuid or track.parent_uuid in self.tracks, track
                self.tracks[track.uuid] = track
                continue
            assert kind == "track_event", kind
            event = packet.track_event
            assert packet.timestamp >= clock, "events come in the order of time"
            clock = packet.timestamp
            track = self.tracks[event.track_uuid]
            if event.type == TrackEvent.TYPE_SLICE_BEGIN:
                assert event.name and list(event.categories) == ["hotcell"], event
                open_slices.setdefault(track.uuid, []).append((event, clock))
            elif event.type == TrackEvent.TYPE_SLICE_END:
                begun, since = open_slices[track.uuid].pop()
                assert since < clock, begun
                self.slices.append((track.name, begun, since, clock))
            elif event.type == TrackEvent.TYPE_INSTANT:
                self.moments.append((track.name, event.name, clock))
            else:
                assert event.type == TrackEvent.TYPE_COUNTER and track.HasField("counter"), event
                self.counts.setdefault(track.name, []).append(event.counter_value)
        assert not any(open_slices.values()), "each slice has an end"

    def known(self, message):
        """Nothing in it is unknown to Perfetto's schema."""
        assert not len(UnknownFieldSet(message)), message
        for field, value in message.ListFields():
            if field.type == field.TYPE_MESSAGE:
                for one in value if field.is_repeated else [value]:
                    self.known(one)

    def processes(self):
        return [track.process.process_name for track in self.tracks.values() if track.HasField("process")]

    def on(self, track):
        return [one for one in self.slices if one[0] == track]


def notes(event):
    return {note.name: getattr(note, note.WhichOneof("value")) for note in event.debug_annotations}


def traced(cell, *flags):
    path = cell.folder / "trace.pftrace"
    told = json.loads(cell.command("--json", "debug", "trace", "-o", str(path), *flags))
    return told, Timeline(path)


def check_whole(cell):
    told, timeline = traced(cell, "--for", "2s", "--nodes", "--prompt", PROMPT, "--tokens", "64")
    processes = timeline.processes()
    assert [name.split()[1] for name in processes] == ["worker", "scheduler", "client"], processes
    assert told["deaths"] == 0 and told["broke_off"] is None, told
    steps = timeline.on("steps")
    assert len(steps) == told["steps"] > 10, told
    names = {event.name for _, event, _, _ in steps}
    assert {"prefill", "decode"} <= names <= {"prefill", "decode", "prefill and decode"}, names
    for _, event, _, _ in steps:
        said = notes(event)
        assert (said["reading"] == 0) == (event.name == "decode"), said
        assert said["rows"] >= said["reading"] and said["sequences"] >= 1, said
    # What the device computes lies inside of steps, and nodes inside of that.
    inside = lambda inner, outer: sum(any(a <= one[2] and one[3] <= b for _, _, a, b in outer) for one in inner)
    device, nodes = timeline.on("device"), timeline.on("nodes")
    assert inside(device, steps) == len(device) == len(steps)
    assert inside(nodes, device) >= 0.9 * len(nodes)
    # Of a fast model's steps only as many are told node by node as may be told in a second: wholly or not at all.
    told_of_steps = [inside(nodes, [one]) for one in device]
    told_in_full = [told for told in told_of_steps if told]
    assert told_in_full and min(told_in_full) > 10, told_of_steps
    products = {event.name for _, event, _, _ in nodes if notes(event).get("op") == "mul_mat"}
    assert "logits" in products and any(name.startswith("layers.") for name in products), products
    copies = [(event.name, notes(event)["bytes"]) for _, event, _, _ in timeline.on("copies")]
    assert {"rows", "logits"} <= {what for what, _ in copies} and all(size > 0 for _, size in copies), copies
    calls = [event.name for _, event, _, _ in timeline.on("Tokens.Generate")]
    assert sorted(calls) == ["Tokens.Generate", "tokens", "until it is accepted", "until the first token"], calls
    # One trace id from the client through the scheduler.
    trace = {notes(event).get("trace_id") for track, event, _, _ in timeline.slices if track.startswith(("Tokens.", "request r-"))}
    assert len(trace - {None}) == 1, trace
    assert [track for track, event, _, _ in timeline.slices if event.name == "waits" and track.startswith("queue r-")]
    units = {track.name: track.counter.unit for track in timeline.tracks.values() if track.HasField("counter")}
    for name in ("cache", "memory.weights", "memory.cache", "memory.plans"):
        # On a fast machine so few tokens come and go between two looks, and nothing is in use at either.
        least = 0 if name == "cache" else 1
        assert units[name] == CounterDescriptor.UNIT_SIZE_BYTES and max(timeline.counts[name]) >= least, name
    for name in ("running", "waiting", "queue"):
        assert units[name] == CounterDescriptor.UNIT_COUNT, name
    return f"{len(timeline.trace.packet)} packets, {len(timeline.slices)} slices, {len(units)} counters"


def check_steps(cell):
    told, timeline = traced(cell, "--steps", "7", "--prompt", PROMPT, "--tokens", "200")
    assert told["steps"] == 7 and len(timeline.on("steps")) == 7, told


def check_a_worker_dies_under_it(cell):
    over = threading.Event()

    def busy():
        while not over.is_set():
            cell.command("generate", PROMPT, "--max-tokens", "900")

    with cell.dies():
        join = hotcell.in_background(lambda: traced(cell, "--for", "5s", "--prompt", PROMPT, "--tokens", "900"))
        cell.wait(lambda: cell.running() > 0, 10, "at work")
        # So many that there is an answer for the death to strike, however quick one is.
        others = [hotcell.in_background(busy) for _ in range(6)]
        # What was not told yet when a process dies is lost with it: it tells what it did a few times a second.
        time.sleep(0.5)
        cell.wait(lambda: cell.running() > 0, 10, "at work")
        with contextlib.suppress(ProcessLookupError):
            cell.kill_worker()
        told, timeline = join()
        over.set()
        for other in others:
            other()
    assert told["deaths"] == 1 and told["broke_off"] is None, told
    moments = {name: at for track, name, at in timeline.moments if track == "events"}
    died = [at for name, at in moments.items() if " died: " in name]
    went_on = [at for name, at in moments.items() if " goes on " in name]
    assert len(died) == 1 and went_on, moments
    gone = [one for one in timeline.on("events") if one[1].name.endswith("is not traced")]
    assert len(gone) == 1, gone
    _, _, since, until = gone[0]
    steps = timeline.on("steps")
    before, after = [one for one in steps if one[3] <= since], [one for one in steps if one[2] >= until]
    assert before and after and not [one for one in steps if since < one[2] < until], (len(before), len(after))
    return f"{len(before)} steps before it, {len(after)} after {(until - since) / 1e9:.2f} s"


hotcell.main(globals())
