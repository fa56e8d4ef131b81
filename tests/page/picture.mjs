// Takes a picture of the page under load, for the README: the page itself as SVG, so that it is text and follows the reader's dark or light.

import { writeFileSync } from "node:fs";
import { chromium } from "playwright-core";
import { load, up } from "./cluster.mjs";

const [, , baton, browserPath, to, model] = process.argv;
const [WIDTH, SECONDS, LANES] = [1280, 45, 3];

/** The page as an SVG document. In the browser. */
function picture([css, icon]) {
  const body = document.body.cloneNode(true);
  body.querySelectorAll("script, .skip, [aria-live]:empty").forEach((node) => node.remove());
  const drawn = new DOMParser().parseFromString(icon, "image/svg+xml").documentElement;
  body.querySelectorAll("img").forEach((image) => {
    for (const name of ["width", "height"]) drawn.setAttribute(name, image[name]);
    image.replaceWith(document.importNode(drawn, true));
  });
  body.querySelectorAll("a").forEach((node) => node.removeAttribute("href"));
  const height = Math.ceil(document.body.getBoundingClientRect().height);
  const width = document.documentElement.clientWidth;
  const page = new XMLSerializer().serializeToString(body);
  return `<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 ${width} ${height}" role="img" aria-label="Baton's live page under load">` +
    `<style>${css.replaceAll("&", "&amp;").replaceAll("<", "&lt;")}</style><foreignObject width="${width}" height="${height}">${page}</foreignObject></svg>\n`;
}

/** A style sheet without its rules for narrow screens: a picture is shown in any width, and is the same. */
function forWide(css) {
  let wide = "";
  for (let at = 0; at < css.length;) {
    const begin = css.indexOf("@media (max-width", at);
    if (begin < 0) return wide + css.slice(at);
    wide += css.slice(at, begin);
    let depth = 0;
    for (at = begin; at < css.length; at++) {
      if (css[at] === "{") depth++;
      if (css[at] === "}" && --depth === 0) break;
    }
    at++;
  }
  return wide;
}

const cluster = await up(baton, model);
const work = load(cluster, LANES);
const browser = await chromium.launch({ executablePath: browserPath, args: ["--no-sandbox"] });
try {
  const page = await browser.newPage({ viewport: { width: WIDTH, height: 900 } });
  await page.goto(`${cluster.page}#/cluster`);
  await page.waitForTimeout(SECONDS * 1000);
  const file = async (name) => (await fetch(`${cluster.page}page/${name}`)).text();
  const drawn = await page.evaluate(picture, [forWide(await file("style.css")), await file("icon.svg")]);
  writeFileSync(to, drawn);
  console.log(`${to}: ${drawn.length} bytes`);
} finally {
  await browser.close();
  await work.end();
  await cluster.stop();
}
