// ---- all of it
head();
images();
one();
changes();
map();
corrections();
find();
skips();
if (truth) {
  $("confusion").hidden = false;
  $("show-now").onclick = () => confusion("now");
  $("show-before").onclick = () => confusion("before");
  confusion("now");
  $("calibration").hidden = !D.calibration;
  if (D.calibration) reliability();
}
