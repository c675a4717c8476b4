"""The shared look: readable in light and in dark, complete, and loading nothing."""

from __future__ import annotations

import re

import pytest

from deploykit.core.files import LOOK as FILE


def contrast(a: str, b: str) -> float:
    """WCAG 2.2, "contrast ratio"."""

    def luminance(colour: str) -> float:
        parts = [int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)]
        red, green, blue = (
            p / 12.92 if p <= 0.04045 else ((p + 0.055) / 1.055) ** 2.4 for p in parts
        )
        return 0.2126 * red + 0.7152 * green + 0.0722 * blue

    high, low = sorted((luminance(a), luminance(b)), reverse=True)
    return (high + 0.05) / (low + 0.05)


LOOK = FILE.read_text()
THEME = re.compile(r"--([a-z0-9-]+): (#[0-9a-f]{6});")


def themes() -> dict[str, dict[str, str]]:
    light, dark = LOOK.split("@media screen and (prefers-color-scheme: dark)")
    return {
        "light": dict(THEME.findall(light)),
        "dark": dict(THEME.findall(dark.split("* {")[0])),
    }


@pytest.mark.parametrize("theme", ["light", "dark"])
def test_text_has_a_contrast_of_4_5_and_graphics_of_3(theme: str) -> None:
    colours = themes()[theme]
    assert len(colours) == 27
    for ground in ("ground", "card"):
        for text in ("ink", "quiet", "good", "bad", "accent"):
            assert contrast(colours[text], colours[ground]) >= 4.5, (text, ground)
    assert contrast(colours["on-accent"], colours["accent"]) >= 4.5
    for look in ("busy", *(f"c{number}" for number in range(16))):
        assert contrast(colours[look], colours["card"]) >= 3, look


def test_every_colour_is_defined_in_both_themes_and_nothing_is_loaded() -> None:
    light, dark = themes().values()
    assert light.keys() == dark.keys()
    own = {"k", "sans", "mono"}  # set by a class, and the two fonts
    assert set(re.findall(r"var\(--([a-z0-9-]+)\)", LOOK)) - own <= light.keys()
    assert not re.search(r"url\(|@import|^import|fetch\(|</script|</style", LOOK, re.MULTILINE)
    assert set(re.findall(r"https?://[^\s\"')]+", LOOK)) <= {"http://www.w3.org/2000/svg"}
