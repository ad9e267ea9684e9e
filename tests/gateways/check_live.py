# programs: chromium
# quick
"""The live page in a real browser: what it shows while a worker dies, what it asks for, and for whom it can be used."""
import contextlib
import json
import os
import threading
import time
import urllib.request

import browser
import hotcell

CELL = "[...document.querySelectorAll('#{table} tbody tr')].map(r => [...r.cells].map(c => c.textContent))"


def rows(page, table):
    return page.js(CELL.format(table=table))


@contextlib.contextmanager
def busy(cell, clients=3, tokens=400):
    """Within, requests run, however fast this machine is: each of so many clients sends the next one after the last."""
    asked = {"model": "kjv", "prompt": "In the beginning", "max_tokens": tokens, "ignore_eos": True}
    over = threading.Event()

    def work():
        while not over.is_set():
            request = urllib.request.Request(cell.url + "/v1/completions", json.dumps(asked).encode(), {"content-type": "application/json"})
            with urllib.request.urlopen(request, timeout=120) as answer:
                made = json.load(answer)["usage"]["completion_tokens"]
            assert made == tokens, f"{made} of {tokens} tokens"

    working = [hotcell.in_background(work) for _ in range(clients)]
    try:
        yield
    finally:
        over.set()
        for done in working:
            done()


def shoot(page, name):
    folder = os.environ.get("HOTCELL_SCREENSHOTS")
    if folder:
        page.screenshot(os.path.join(folder, name))


def check_a_worker_dies_while_the_page_is_open(cell):
    """Tokens, requests and steps appear; a worker is killed, and its death, its report and its successor do, without a reload."""
    with browser.Browser() as page:
        page.open(hotcell.readme(cell, "a browser"))
        page.wait("document.querySelector('#workers tbody tr')", 20, "listing workers")
        page.wait("document.getElementById('host').textContent.startsWith('serving')", 10, "serving")
        assert rows(page, "workers")[0][1] == "ready", rows(page, "workers")
        assert rows(page, "devices")[0][0] == "cpu:0" and rows(page, "models")[0][:2] == ["kjv", "loaded"]
        assert page.js("document.getElementById('no-crashes').hidden") is False
        with busy(cell):
            page.wait("document.querySelectorAll('#requests tbody tr').length > 0", 10, "showing the request")
            page.wait("parseFloat(document.getElementById('n-tokens').textContent) > 0", 10, "counting tokens")
            page.wait("document.querySelector('#workers tbody td:nth-child(8)').textContent != '–'", 10, "counting steps")
            shoot(page, "busy.png")
            with cell.dies():
                epoch = rows(page, "workers")[0][4]
                worker = cell.kill_worker()
                page.wait("document.querySelectorAll('#crashes tbody tr').length == 1", 15, "showing the crash")
                page.wait(f"document.querySelector('#workers tbody td:nth-child(5)').textContent != '{epoch}'", 20, "showing the next process")
                page.wait("document.querySelector('#workers tbody td:nth-child(2)').textContent == 'ready'", 20, "ready again")
        crash = rows(page, "crashes")[0]
        assert crash[0].startswith(worker) and "SIGKILL" in crash[2], crash
        page.wait("document.querySelector('#crashes tbody td:nth-child(6)').textContent.includes('continued')", 15, "telling what became of the request")
        events = page.js("document.getElementById('events').textContent")
        assert "worker died" in events and "worker ready" in events, events
        # The report itself: by the keyboard, as all of it can be.
        page.js("document.querySelector('#crashes button').focus()")
        page.press("Enter", "\r")
        page.wait("!document.getElementById('crash').hidden", 10, "opening the report")
        report = page.js("document.getElementById('c-text').textContent")
        assert "ran:" in report and "continued" in report, report
        assert page.js("document.activeElement.id") == "c-title"
        shoot(page, "crash.png")
        page.wait("document.getElementById('n-whole').textContent.includes('/')", 10, "telling percentiles")
        page.wait("parseInt(document.getElementById('n-continued').textContent) > 0", 10, "counting the continuation")
        assert not page.complaints, page.complaints
        # Nothing from anywhere else.
        assert page.asked and all(url.startswith(cell.url) for url in page.asked if url != "about:blank"), page.asked


def check_a_timeline(cell):
    """A trace of a second is drawn and told in words."""
    with browser.Browser() as page:
        page.open(cell.url + "/live")
        page.wait("document.querySelector('#workers button')", 20, "offering a trace")
        with busy(cell):
            page.js("document.querySelector('#workers button').click()")
            page.wait("/steps in/.test(document.getElementById('t-said').textContent)", 20, "telling the steps")
        assert page.js("document.querySelectorAll('#t-plot rect').length") > 20
        assert len(rows(page, "t-steps")) == 20
        nodes = [row[0] for row in rows(page, "t-nodes")]
        assert 10 < len(nodes) <= 20 and any(name.startswith("layers.") for name in nodes), nodes
        shoot(page, "timeline.png")
        assert not page.complaints, page.complaints


def check_who_uses_it(cell):
    """By keyboard alone, with a screen reader, in the dark."""
    colours = {}
    for dark in (False, True):
        with browser.Browser(dark) as page:
            page.open(cell.url + "/live")
            page.wait("document.querySelector('#workers button')", 20, "complete")
            colours[dark] = page.js("getComputedStyle(document.body).backgroundColor")
            shoot(page, "dark.png" if dark else "light.png")
            contrast = page.js(CONTRAST)
            assert contrast >= 4.5, (dark, contrast)
            if dark:
                continue
            tree = page.tree()
            for wanted in (("main", ""), ("heading", "Workers"), ("button", "Trace w0 for one second"), ("log", "What happens"), ("columnheader", "State")):
                assert any(role == wanted[0] and wanted[1] in name for role, name in tree), (wanted, tree[:80])
            images = [name for role, name in tree if role == "image"]
            assert len(images) >= 4 and all(images), images
            page.js("document.body.focus()")
            reached = []
            for _ in range(4):
                page.press("Tab")
                reached.append(page.js("document.activeElement.textContent"))
            assert reached[0] == "To the workers" and "Trace 1 s" in reached, reached
            # Each second fills the table anew, and does not take the keyboard away.
            page.js("document.querySelector('#workers button').focus()")
            time.sleep(2.5)
            assert page.js("document.activeElement.tagName") == "BUTTON"
    assert colours[False] != colours[True], colours


# The least contrast of its colours of text on its ground (WCAG 2.1, 1.4.3).
CONTRAST = """(() => {
  const channel = c => { c /= 255; return c <= 0.03928 ? c / 12.92 : ((c + 0.055) / 1.055) ** 2.4; };
  const light = rgb => rgb.match(/\\d+/g).slice(0, 3).map(Number).map(channel).reduce((s, c, i) => s + c * [0.2126, 0.7152, 0.0722][i], 0);
  const ground = light(getComputedStyle(document.body).backgroundColor);
  const ratio = of => { const l = light(of); return (Math.max(l, ground) + 0.05) / (Math.min(l, ground) + 0.05); };
  const probe = document.createElement('p');
  document.body.append(probe);
  const all = ['--text', '--dim', '--good', '--bad'].map(name => { probe.style.color = `var(${name})`; return ratio(getComputedStyle(probe).color); });
  probe.remove();
  return Math.min(...all);
})()"""


def check_markup_from_elsewhere_is_text(cell):
    """A request's id that would be markup is shown as it is; the page's policy would not let it run either."""
    with browser.Browser() as page:
        page.open(cell.url + "/live")
        page.wait("document.querySelector('#workers button')", 20, "complete")
        page.js("happened({kind: 'worker_died', time_ms: 0, worker: '<img src=x onerror=window.hit=1>', epoch: 1, model: '', message: ''})")
        assert page.js("document.querySelectorAll('#events img').length") == 0 and page.js("window.hit") is None
        refused = page.js("(() => { try { document.body.innerHTML = '<p>'; return false } catch (e) { return e instanceof TypeError } })()")
        assert refused, "the page may make markup of text"


hotcell.main(globals())
