"""The chat page in headless Chromium (Debian: chromium, chromium-driver), with axe-core of npm's registry:
pytest -m slow tests/serve/test_page.py"""

from __future__ import annotations

import json
import shutil
import subprocess
import tarfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from selenium import webdriver
from selenium.common.exceptions import StaleElementReferenceException
from selenium.webdriver import ActionChains, ChromeOptions, ChromeService, Keys
from selenium.webdriver.common.by import By
from selenium.webdriver.remote.webelement import WebElement
from selenium.webdriver.support.ui import WebDriverWait

from conftest import put_listed
from eagle_runtime import EagleModel
from eagle_serve import Options
from eagle_serve.server import serving
from patience import PATIENCE_S

pytestmark = pytest.mark.slow
KEY = "k" * 24
ATTACK = '<img src=x onerror="document.title=1"><script>document.title=2</script>'
WIDTHS = (1200, 320)
AXE = "axe-core@4.14.1"
TOOL = {
    "name": "weather",
    "parameters": {
        "type": "object",
        "properties": {"place": {"enum": ["Rome", "Oslo"]}, "days": {"enum": [1, 3]}},
        "required": ["place", "days"],
    },
}
THINKING = "{% for m in messages %}{{ m.role[0] }}: {{ m.content }}\n{% endfor %}a: <think>{# </think> #}"


class Page:
    """The chat page, as a user has it."""

    def __init__(self, driver: webdriver.Chrome, address: str) -> None:
        self.driver = driver
        self.address = address

    def open(self, fragment: str = "") -> None:
        self.driver.get("about:blank")
        self.driver.get(f"{self.address}/{fragment}")
        self.until(lambda: self.all(".badge"))

    def one(self, selector: str) -> WebElement:
        return self.driver.find_element(By.CSS_SELECTOR, selector)

    def all(self, selector: str) -> list[WebElement]:
        return self.driver.find_elements(By.CSS_SELECTOR, selector)

    def until(self, holds: Callable[[], Any]) -> None:
        replaced = [StaleElementReferenceException]  # the page makes its messages anew
        waiting = WebDriverWait(self.driver, PATIENCE_S, poll_frequency=0.05, ignored_exceptions=replaced)
        waiting.until(lambda _: holds())

    def fill(self, selector: str, text: str) -> None:
        self.one(selector).clear()
        self.one(selector).send_keys(text)

    def send(self, text: str) -> None:
        """Write a message, send it, and wait for the whole answer."""
        self.one("#input").send_keys(text, Keys.ENTER)
        self.answered()

    def answered(self) -> None:
        self.until(lambda: self.one("#send").is_displayed() and self.all("li:last-child .actions"))

    def press(self, name: str, item: str = "li:last-child") -> None:
        (button,) = [button for button in self.all(f"{item} button") if button.text == name]
        button.click()

    def texts(self) -> list[str]:
        """Texts of the messages, as the page has them."""
        return [str(body.get_attribute("textContent")) for body in self.all("#messages .body")]

    def color(self, selector: str) -> str:
        return str(self.one(selector).value_of_css_property("background-color"))

    def requested(self) -> set[str]:
        """Addresses of all requests since the last call."""
        messages = [json.loads(entry["message"])["message"] for entry in self.driver.get_log("performance")]  # type: ignore[no-untyped-call]
        return {m["params"]["request"]["url"] for m in messages if m["method"] == "Network.requestWillBeSent"}

    def complaints(self) -> list[str]:
        """What the browser has written to its console."""
        return [entry["message"] for entry in self.driver.get_log("browser")]  # type: ignore[no-untyped-call]


@pytest.fixture(scope="module")
def driver() -> Iterator[webdriver.Chrome]:
    program, browser = shutil.which("chromedriver"), shutil.which("chromium")
    assert program and browser, "needs chromium and chromedriver: apt-get install chromium chromium-driver"
    options = ChromeOptions()
    options.binary_location = browser
    for argument in ("--headless=new", "--no-sandbox", "--disable-gpu", "--window-size=1200,800"):
        options.add_argument(argument)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL", "performance": "ALL"})
    started = webdriver.Chrome(options=options, service=ChromeService(program))
    yield started
    started.quit()


@pytest.fixture(scope="module")
def axe(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The script that looks for what keeps people from using a page."""
    folder = tmp_path_factory.mktemp("axe")
    npm = shutil.which("npm")
    assert npm, "needs npm, which brings axe-core: apt-get install npm"
    subprocess.run([npm, "pack", AXE], cwd=folder, check=True, capture_output=True)
    (packed,) = folder.glob("*.tgz")
    with tarfile.open(packed) as archive:
        script = archive.extractfile("package/axe.min.js")
        assert script is not None
        return script.read().decode()


def barriers(page: Page, axe: str) -> list[str]:
    """What axe-core finds serious or critical on the page as it stands."""
    page.driver.execute_script(axe)
    found = page.driver.execute_async_script("axe.run().then(arguments[0])")
    assert found["passes"]
    return [
        f"{rule['id']} ({rule['impact']}): {node['html'][:200]}"
        for rule in found["violations"]
        for node in rule["nodes"]
        if rule["impact"] in ("serious", "critical")
    ]


@pytest.fixture
def page(driver: webdriver.Chrome, served_model: EagleModel, served_bundle: Path) -> Iterator[Page]:
    with serving(served_model, served_bundle) as where:
        opened = Page(driver, where)
        opened.requested(), opened.complaints()
        opened.open()
        driver.execute_script("sessionStorage.clear()")
        opened.open()
        yield opened
        hosts = {url.removeprefix(where)[:1] for url in opened.requested() if not url.startswith(("data:", "about:"))}
        assert hosts == {"/"}, "a request went to another host"
        assert opened.complaints() == []
        driver.get("about:blank")


def test_a_chat(page: Page, served_model: EagleModel) -> None:
    page.fill("#temperature", "0.7")
    page.fill("#seed", "5")
    page.fill("#max_tokens", "40")
    page.send("Hello there")
    messages = [{"role": "user", "content": "Hello there"}]
    wanted = served_model.generate(messages, max_new_tokens=40, temperature=0.7, seed=5)
    assert page.texts() == ["Hello there", wanted.text]
    figures = page.one("li:last-child .meta").text
    assert "seed 5" in figures and f"{len(wanted.token_ids)} tokens" in figures and "tau" in figures
    assert page.one("#context-text").text == f"{wanted.usage.prompt_tokens + len(wanted.token_ids)} / 2048"
    assert len(page.all("#graph rect")) > 0 and page.one("#graph polyline")
    assert page.driver.title == "pair - eagle-serve"


def test_regenerate_edit_and_reload(page: Page) -> None:
    page.fill("#max_tokens", "12")
    page.fill("#temperature", "2")
    page.fill("#seed", "1")
    page.send("one")
    first = page.texts()[1]
    page.press("Retry")
    page.answered()
    assert page.texts() == ["one", first]  # the same seed
    page.fill("#seed", "2")
    page.press("Retry")
    page.answered()
    second = page.texts()[1]
    assert second != first
    page.send("two")
    assert len(page.texts()) == 4
    page.press("Edit", "li:first-child")
    box = page.one("li:first-child textarea")
    box.clear()
    box.send_keys("three")
    page.press("Send again", "li:first-child")
    page.answered()
    assert page.texts()[0] == "three" and len(page.texts()) == 2
    said = page.texts()
    page.open()
    assert page.texts() == said
    page.one("#new-chat").click()
    assert page.texts() == [] and page.one(".empty").text == "Ask something."


def test_stop(page: Page) -> None:
    page.fill("#temperature", "0")
    page.one("#input").send_keys("a", Keys.ENTER)
    page.until(lambda: page.all(".answer .t"))
    page.driver.switch_to.active_element.send_keys(Keys.ESCAPE)
    page.answered()
    assert len(page.texts()) == 2 and page.texts()[1]
    page.send("b")
    assert len(page.texts()) == 4


def test_tokens_are_distinguished_and_explained(page: Page) -> None:
    page.fill("#max_tokens", "60")
    page.fill("#temperature", "0")
    page.send("def f(")
    assert not page.all(".shown") and not page.one("#legend").is_displayed()
    page.one("#show-tokens").click()
    assert page.one("#legend").is_displayed()
    drafted, own = page.all(".shown .t.d"), page.all(".shown .t.o")
    assert drafted and own
    assert "underline" in drafted[0].value_of_css_property("text-decoration-line")
    assert "underline" not in own[0].value_of_css_property("text-decoration-line")
    ActionChains(page.driver).move_to_element(drafted[0]).perform()
    page.until(lambda: page.one("#tip").is_displayed())
    tip = page.one("#tip").text
    assert "drafted, and accepted" in tip and "log-probability" in tip and len(page.all("#tip tr")) == 4
    page.driver.execute_script("document.querySelector('.shown').focus()")
    page.driver.switch_to.active_element.send_keys(Keys.ARROW_RIGHT, Keys.ARROW_RIGHT)
    assert page.one(".at").get_attribute("data-index") == "1" and page.one("#tip").is_displayed()


def calls(page: Page) -> list[WebElement]:
    return page.all("li:last-child .card")


def test_a_call_is_a_card_and_its_result_goes_back(page: Page) -> None:
    page.fill("#tools", json.dumps([TOOL]))
    page.one("#tool_choice").send_keys("required")
    page.fill("#temperature", "0")
    page.send("Will it rain?")
    (card, *others) = calls(page)
    assert card.get_attribute("aria-label") == "Call of weather"
    given = json.loads(card.find_element(By.CSS_SELECTOR, ".arguments").text)
    assert given["place"] in ("Rome", "Oslo") and given["days"] in (1, 3)
    assert page.texts()[1] == "" and not page.all(".shown")
    page.one("#show-tokens").click()
    assert page.texts()[1].count("weather") == 1 + len(others) and page.all(".shown .t.d")
    page.one("#show-tokens").click()
    page.one("#tool_choice").send_keys("none")
    page.fill("#max_tokens", "5")
    page.fill("li:last-child .card textarea", "rain <b>all</b> day")
    page.driver.execute_script(
        "window.bodies = []; const real = fetch;"
        "window.fetch = (path, options) => (options?.body && bodies.push(options.body), real(path, options))"
    )
    page.press(f"Send result{'s' if others else ''}")
    page.until(lambda: len(page.texts()) == 3)
    page.answered()
    sent = json.loads(page.driver.execute_script("return bodies[0]"))["messages"]
    assert sent[1]["tool_calls"][0]["function"]["name"] == "weather" and sent[1]["content"] is None
    assert json.loads(sent[1]["tool_calls"][0]["function"]["arguments"]) == given
    assert sent[2]["role"] == "tool" and sent[2]["content"] == "rain <b>all</b> day"
    assert sent[2]["tool_call_id"] == sent[1]["tool_calls"][0]["id"]
    assert page.one(".card .result").text == "rain <b>all</b> day" and not page.all(".card b")
    page.open()
    assert page.one(".card .result").text == "rain <b>all</b> day"
    page.fill("#tools", "{")
    page.one("#input").send_keys("x", Keys.ENTER)
    page.until(lambda: page.one("#error").is_displayed())
    assert "the list of tools is not JSON" in page.one("#error").text


def test_a_call_that_is_cut_off_is_shown_but_not_sent(page: Page) -> None:
    page.fill("#tools", json.dumps(TOOL))
    page.one("#tool_choice").send_keys("required")
    page.fill("#max_tokens", "50")
    page.send("Will it rain?")
    assert "The call was cut off." in page.one("li:last-child .card").text
    assert not page.all("li:last-child .card textarea")
    page.one("#tool_choice").send_keys("none")
    page.send("And now?")
    assert len(page.texts()) == 4


def test_thinking_is_folded(driver: webdriver.Chrome, served_bundle: Path, tmp_path: Path) -> None:
    bundle = shutil.copytree(served_bundle, tmp_path / "thinker")
    put_listed(bundle, "chat_template.jinja", THINKING.encode())
    with EagleModel.load(bundle, threads=1) as model, serving(model, bundle) as where:
        page = Page(driver, where)
        page.open()
        page.fill("#max_tokens", "12")
        page.fill("#temperature", "0")
        page.send("a")
        thought = model.generate([{"role": "user", "content": "a"}], max_new_tokens=12, temperature=0).text
        folded = page.one("li:last-child .thinking")
        assert folded.text == "Thinking" and not page.one(".thinking .body").is_displayed()
        page.one(".thinking summary").send_keys(Keys.ENTER)
        assert page.one(".thinking .body").get_attribute("textContent") == thought
        driver.get("about:blank")


def test_an_answer_is_compared_with_vanilla(page: Page) -> None:
    page.fill("#temperature", "1")
    page.fill("#max_tokens", "30")
    page.send("def f(")
    said = page.texts()
    page.press("Compare with vanilla")
    page.until(lambda: "times vanilla" in page.one("li:last-child .meta").text)
    assert "the same text" in page.one("li:last-child .meta").text and page.texts() == said


def test_keys_and_words_for_all_that_is_done(page: Page) -> None:
    """From the message box to an answer's buttons and back without a mouse; what happens is said."""
    page.fill("#max_tokens", "8")
    page.send("a")
    assert page.one("#status").text == "Answered."
    page.until(lambda: page.one("#spoken").get_attribute("textContent") == page.texts()[1])
    assert page.driver.switch_to.active_element.get_attribute("id") == "input"
    names = []
    for _ in range(12):
        page.driver.switch_to.active_element.send_keys(Keys.SHIFT + Keys.TAB)
        names.append(page.driver.switch_to.active_element.text)
        if names[-1] == "Retry":
            break
    assert names[-1] == "Retry", names
    page.driver.switch_to.active_element.send_keys(Keys.ENTER)
    page.answered()
    assert page.driver.switch_to.active_element.get_attribute("id") == "input"


@pytest.mark.parametrize("theme", ["light", "dark"])
def test_nothing_keeps_people_from_using_it(page: Page, axe: str, theme: str) -> None:
    page.one("#theme").send_keys(theme)
    assert (int(page.color("body")[4:-1].replace("(", "").split(",")[0]) < 128) == (theme == "dark")
    assert barriers(page, axe) == []
    page.fill("#tools", json.dumps([TOOL]))
    page.one("#tool_choice").send_keys("required")
    page.send("Will it rain?")
    assert calls(page) and barriers(page, axe) == []
    page.fill("#tools", "")
    page.fill("#max_tokens", "20")
    page.one("#show-tokens").click()
    page.send("hello")
    page.driver.execute_script("document.querySelector('li:last-child .shown').focus()")
    page.driver.switch_to.active_element.send_keys(Keys.ARROW_RIGHT)
    assert page.one("#tip").is_displayed() and barriers(page, axe) == []
    page.press("Edit", "li:first-child")
    page.fill("#schema", "{")
    page.one("#input").send_keys("x", Keys.ENTER)
    page.until(lambda: page.one("#error").is_displayed())
    assert barriers(page, axe) == []


def test_text_of_the_model_stays_text(page: Page) -> None:
    page.fill("#schema", json.dumps({"const": ATTACK}))
    page.one("#show-tokens").click()
    page.send(ATTACK)
    assert page.texts() == [ATTACK, json.dumps(ATTACK)]
    assert not page.all("#messages img") and not page.all("#messages script")
    assert page.driver.title == "pair - eagle-serve"
    page.open()
    assert page.texts() == [ATTACK, json.dumps(ATTACK)] and not page.all("#messages img")
    page.fill("#schema", "{")
    page.one("#input").send_keys("x", Keys.ENTER)
    page.until(lambda: page.one("#error").is_displayed())
    assert "the schema is not JSON" in page.one("#error").text


def test_errors_are_shown(page: Page) -> None:
    page.one("#input").send_keys("refuse this", Keys.ENTER)
    page.until(lambda: page.one("#error").is_displayed())
    assert "no thanks" in page.one("#error").text
    assert [text for text in page.complaints() if "400" not in text] == []


def test_the_key_comes_from_the_fragment(
    driver: webdriver.Chrome, served_model: EagleModel, served_bundle: Path
) -> None:
    with serving(served_model, served_bundle, Options(api_key=KEY)) as where:
        page = Page(driver, where)
        page.open(f"#key={KEY}")
        assert KEY not in driver.current_url
        page.fill("#max_tokens", "3")
        page.send("a")
        page.open()
        assert len(page.texts()) == 2
        driver.execute_script("sessionStorage.clear()")
        driver.get(where)
        page.until(lambda: page.one("#error").is_displayed())
        assert "API key" in page.one("#error").text
        assert not any(KEY in url for url in page.requested())
        page.complaints()
        driver.get("about:blank")


@pytest.mark.parametrize("theme", ["light", "dark"])
@pytest.mark.parametrize("width", WIDTHS)
def test_it_fits_every_screen(page: Page, width: int, theme: str, tmp_path: Path) -> None:
    phone = {"width": width, "height": 800, "deviceScaleFactor": 1, "mobile": width < 400}
    page.driver.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", phone)
    wanted = {"features": [{"name": "prefers-color-scheme", "value": theme}]}
    page.driver.execute_cdp_cmd("Emulation.setEmulatedMedia", wanted)
    try:
        page.open()
        if width < 400:
            assert not page.one("#panel").is_displayed()
            page.one("#open-panel").click()
        assert page.one("#panel").is_displayed()
        page.fill("#max_tokens", "80")
        if width < 400:
            page.one("#open-panel").click()
        page.one("#show-tokens").click()
        page.send("a" * 300 + " word " * 30)
        (tmp_path / f"{width}_{theme}.png").write_bytes(page.driver.get_screenshot_as_png())
        scrolled = page.driver.execute_script("return document.documentElement.scrollWidth")
        assert scrolled <= width
        dark = [int(part) < 128 for part in page.color("body")[4:-1].replace("(", "").split(",")[:3]]
        assert dark == [theme == "dark"] * 3
    finally:
        page.driver.execute_cdp_cmd("Emulation.clearDeviceMetricsOverride", {})
        page.driver.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": []})
